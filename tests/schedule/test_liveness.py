"""Predicted memory is what the executor holds: storage by storage, at the worst moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from support.models.small_gpt import BATCH, CONTEXT, VOCABULARY, SmallGPT
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import djinn
from djinn.ir.phase import ExecutionPhase
from djinn.ir.spec import SpecTable, TensorSpec, tensors_in
from djinn.session.programs import lay_out, program_of
from djinn_plugins.common.calls.binding import BoundCall, bind
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.torch.executor import TorchProgram
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.graph.graph import GraphNode, RecordedGraph
from djinn_plugins.graph.metadata import SemanticMetadata
from djinn_plugins.schedule.liveness import MemoryEstimator
from djinn_plugins.schedule.schedule import CachingPolicy, DeviceInfo, ExecutionSchedule, Transfer

DEVICE = "remote_accelerator:0"
Work = Callable[[], Any]


class Held:
    """Storages that are alive, looked at after every call of a program."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def watch(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._known = {name: found for name, found in self._known.items() if not found[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._known.values()))

    def watched(self, call: BoundCall) -> BoundCall:
        def function(*arguments: Any, **keywords: Any) -> Any:
            result = call.function(*arguments, **keywords)
            self.watch(tensors_in([result]))
            return result

        return attrs.evolve(call, function=function)


@pytest.fixture
def session() -> Iterator[Any]:
    yield djinn.init(device="cpu", flush_every=None)
    djinn.shutdown()


def compare(session: Any, work: Work) -> tuple[int, int]:
    """Record a piece of work; return what is predicted, and what its second run holds, which is compiled."""
    djinn.synchronize()
    kept = work()
    while session.released:
        session.released.popleft()
    nodes = session.tape.cut()
    alive = {tensor._value.slot.number for tensor in tensors_in(kept if isinstance(kept, (list, tuple)) else [kept])}
    gone = {slot.number for node in nodes for slot in node.outputs if slot.number not in alive}
    layout, graph = lay_out(nodes, gone), graph_of(nodes)
    estimator = MemoryEstimator(graph, {f"v{number}" for number in alive})
    program, executor = program_of(nodes, layout), CpuExecutor()
    specs = {value: spec for node in graph.nodes() for value, spec in zip(node.inputs, node.input_specs, strict=True)}
    inputs = inputs_of([f"v{handle}" for handle in layout.inputs], graph, specs)
    held = Held()
    held.watch(tensors_in(inputs))
    calls = [held.watched(call) for call in bind(program, torch.device("cpu"))]
    run, state = TorchProgram(program, calls, threading.RLock()), executor.random_state(0)
    for _ in range(2):
        held.peak_bytes = 0
        results = run.run(list(inputs), layout.numbers, state, refuse)
        assert len(results) == len(layout.outputs)
        del results
    return estimator.peak_bytes, held.peak_bytes


def inputs_of(values: list[str], graph: RecordedGraph, specs: dict[str, TensorSpec]) -> list[torch.Tensor]:
    """Make what the program reads; views of one storage share one."""
    storages: dict[str, torch.Tensor] = {}
    made = []
    for value in values:
        base = graph.storages.get(value, value)
        family = [spec for other, spec in specs.items() if graph.storages.get(other, other) == base]
        count = max(spec.reach_bytes // spec.dtype.itemsize for spec in family)
        if base not in storages:
            storages[base] = torch.ones(count, dtype=specs[value].dtype)
        spec = specs[value]
        made.append(storages[base].as_strided(spec.size, spec.stride, spec.storage_offset))
    return made


def refuse(step: int, error: BaseException) -> Any:
    raise AssertionError(f"step {step} failed") from error


def steps(seed: int) -> Work:
    """Thirty random steps: what computes, what looks at the same memory, what writes in place."""
    choice = random.Random(seed)
    values = [torch.ones(16, 16, device=DEVICE), torch.ones(16, 16, device=DEVICE)]
    djinn.synchronize()

    def work() -> Any:
        known = list(values)
        for _ in range(30):
            kind = choice.randrange(8)
            one, other = choice.choice(known), choice.choice(known)
            if kind == 0:
                known.append(torch.cat([one, other])[:16])
            elif kind == 1:
                known.append(one.t())
            elif kind == 2:
                one.add_(1.0)
            elif kind == 3:
                known.append((one.expand(3, 16, 16) * other).sum(0))
            elif kind == 4:
                known.extend(half.repeat(2, 1) for half in one.split(8))
            elif kind == 5:
                known.append(one.unsqueeze(0)[0])
            else:
                known.append(one @ other)
            if len(known) > 4:
                known.pop(choice.randrange(len(known)))
        return choice.sample(known, 2)

    return work


@pytest.mark.parametrize("seed", range(25))
def test_programs_in_a_straight_line_hold_what_is_predicted(session: Any, seed: int) -> None:
    predicted, held = compare(session, steps(seed))
    assert predicted == held > 0


def test_a_model_holds_what_is_predicted(session: Any) -> None:
    model, tokens = SmallGPT().to(DEVICE), torch.arange(32).reshape(1, 32).to(DEVICE)
    with torch.no_grad():
        predicted, held = compare(session, lambda: model(tokens))
    assert predicted == held > sum(weight.nbytes for weight in model.parameters())


def test_a_training_step_holds_what_is_predicted(session: Any) -> None:
    model = SmallGPT().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1)).to(DEVICE)

    def step() -> Any:
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.detach(), *(weight.grad for weight in model.parameters())]

    predicted, held = compare(session, step)
    assert predicted == held > 0


TABLE = SpecTable()


def spec(elements: int) -> TensorSpec:
    return TABLE.intern(torch.Size([elements]), (1,), 0, torch.uint8, torch.device("meta"))


def node(name: str, inputs: dict[str, int], outputs: dict[str, int], phase: str = "", **fields: Any) -> GraphNode:
    meaning = SemanticMetadata("any", execution_phase=ExecutionPhase(phase)) if phase else None
    return GraphNode(name, "any", tuple(inputs), tuple(outputs), tuple(map(spec, outputs.values())),
                     input_specs=tuple(map(spec, inputs.values())), metadata={"meaning": meaning} if meaning else {},
                     **fields)


CHAIN = RecordedGraph((
    node("a", {"w": 100}, {"x": 10}, "llm_prefill"),
    node("b", {"x": 10}, {"y": 20}, "llm_prefill"),
    node("c", {"y": 20}, {"z": 5}, "llm_decode"),
))


def test_what_was_used_for_the_last_time_goes_and_weights_stay() -> None:
    assert MemoryEstimator(CHAIN).peak_bytes == 100 + 10 + 20
    assert MemoryEstimator(CHAIN, {"x", "z"}).peak_bytes == 100 + 10 + 20 + 5


def test_phases_have_budgets_of_their_own() -> None:
    found = MemoryEstimator(CHAIN).estimate(ExecutionSchedule(("a", "b", "c"), dict.fromkeys("abc", "one")))
    assert found.phases == {"one": {ExecutionPhase.LLM_PREFILL: 130, ExecutionPhase.LLM_DECODE: 125}}


def test_what_devices_hold_is_counted_once() -> None:
    devices = [DeviceInfo("one", held_bytes=1000, holds=frozenset({"w"}))]
    schedule = ExecutionSchedule(("a", "b", "c"), dict.fromkeys("abc", "one"))
    assert MemoryEstimator(CHAIN).estimate(schedule, devices).peaks == {"one": 1030}


def test_a_value_that_moves_is_held_at_both_ends_for_as_long_as_it_is_needed_there() -> None:
    schedule = ExecutionSchedule(("a", "b", "c"), {"a": "one", "b": "two", "c": "two"},
                                 (Transfer("x", "one", "two", "a"),))
    assert MemoryEstimator(CHAIN).estimate(schedule).peaks == {"one": 110, "two": 30}


def test_the_source_of_a_transfer_holds_the_value_until_the_target_has_it() -> None:
    graph = RecordedGraph((node("a", {"w": 100}, {"x": 10}), node("b", {"w": 100}, {"q": 50}),
                           node("c", {"q": 50}, {"r": 1}), node("d", {"x": 10}, {"y": 20})))
    schedule = ExecutionSchedule(("a", "b", "c", "d"), {"a": "one", "b": "one", "c": "one", "d": "two"},
                                 (Transfer("x", "one", "two", "a"),))
    assert MemoryEstimator(graph).estimate(schedule).peaks == {"one": 100 + 10 + 50 + 1, "two": 30}


def test_a_weight_that_is_copied_goes_with_its_last_use_there() -> None:
    graph = RecordedGraph((node("a", {"w": 100}, {"x": 10}), node("b", {"x": 10}, {"y": 200})))
    schedule = ExecutionSchedule(("a", "b"), {"a": "two", "b": "two"}, (Transfer("w", "one", "two"),))
    devices = [DeviceInfo("one", held_bytes=100, holds=frozenset({"w"})), DeviceInfo("two")]
    assert MemoryEstimator(graph).estimate(schedule, devices).peaks == {"one": 100, "two": 210}


def test_a_device_on_the_way_holds_a_value_no_longer_than_it_passes() -> None:
    graph = RecordedGraph((node("a", {"w": 100}, {"x": 10}), node("b", {"v": 1}, {"q": 400}),
                           node("c", {"x": 10}, {"z": 5})))
    devices = {"a": "one", "b": "two", "c": "three"}
    for moves in ((Transfer("x", "one", "two", "a"), Transfer("x", "two", "three", "a")),
                  (Transfer("x", "two", "three", "a"), Transfer("x", "one", "two", "a"))):
        schedule = ExecutionSchedule(("a", "b", "c"), devices, moves)
        # What b made is kept: it outlives the graph.
        assert MemoryEstimator(graph).estimate(schedule).peaks == {"one": 110, "two": 1 + 400 + 10, "three": 15}
        assert MemoryEstimator(graph, {"z"}).estimate(schedule).peaks["two"] == 1 + 400


def test_what_persists_stays_where_it_was_made() -> None:
    schedule = ExecutionSchedule(("a", "b", "c"), dict.fromkeys("abc", "one"),
                                 caching={"x": CachingPolicy.PERSIST})
    assert MemoryEstimator(CHAIN).estimate(schedule).peaks == {"one": 100 + 10 + 20 + 5}


def test_a_storage_is_as_large_as_its_furthest_element() -> None:
    device = torch.device("meta")
    assert TABLE.intern(torch.Size([2, 3]), (3, 1), 4, torch.float32, device).reach_bytes == 40
    assert TABLE.intern(torch.Size([5, 3]), (0, 1), 0, torch.float32, device).reach_bytes == 12
    assert TABLE.intern(torch.Size([0]), (1,), 7, torch.float32, device).reach_bytes == 0
