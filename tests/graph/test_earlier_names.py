"""Names of earlier documents do what those documents say; docs/earlier.md shows their use."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
from djinn.core.lazy_tensor import LazyTensor
from djinn.core.operation_classifier import OperationClassifier
from djinn.core.operation_registry import OperationRegistry
from djinn.scheduler import SchedulerBase, scheduler_registry

import djinn
from djinn.errors import InputsError, NothingCapturedError, ScheduleError, UnknownOperatorError
from djinn_plugins.sessions.names.finder import ALIASES

D = "remote_accelerator:0"


def test_every_name_of_an_earlier_module_is_there() -> None:
    for module, names in ALIASES.items():
        loaded = importlib.import_module(module)
        for name in names:
            assert getattr(loaded, name) is not None, f"{module}.{name}"
        assert not hasattr(loaded, "nothing_of_this_name")
    # Importing djinn.runtime must not take away what the kernel calls under that name.
    assert torch.ones(2, device=D).tolist() == [1.0, 1.0]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("djinn.core.nothing_of_this_name")


def test_importing_djinn_loads_none_of_them() -> None:
    from support.processes.warm import run_python

    done = run_python("import sys, djinn; print([name for name in sys.modules if '.sessions.names' in name])")
    assert done.stdout.strip() == "[]"
    assert "djinn_plugins.sessions.names" in sys.modules


def test_a_schedule_takes_the_tensor_that_its_block_made_or_another(session: Any) -> None:
    model = torch.nn.Linear(4, 4)
    with torch.no_grad(), djinn.capture(model) as captured:
        x = torch.randn(2, 4)
        x += 1
        y = model(x)
    schedule = djinn.Scheduler(captured.graph, captured.semantic_metadata).schedule()
    before = x.cpu()
    assert torch.equal(before, x.cpu())
    for strategy in (None, "local"):
        given = torch.full((2, 4), 2.0)
        found = djinn.execute(schedule, inputs=[given], strategy=strategy)[-1]
        torch.testing.assert_close(found.cpu(), model(given + 1).detach())
    found = djinn.execute(schedule, inputs=[x])[-1]
    torch.testing.assert_close(found.cpu(), model(before + 1).detach())
    assert torch.equal(x.cpu(), before), "the graph writes into its own copy"
    assert not torch.equal(djinn.execute(schedule)[-1].cpu(), y.cpu()), "without inputs, the block draws anew"
    with pytest.raises(InputsError, match="made 1 more"):
        djinn.execute(schedule, inputs=[x, x])


def test_the_graph_of_the_last_block_stays_and_its_model_does_not() -> None:
    model = torch.nn.Linear(4, 4).to(D)
    weight = weakref.ref(model)
    with djinn.capture(model):
        model(torch.ones(1, 4))
    count = len(djinn.get_graph().nodes())
    del model
    gc.collect()
    assert weight() is None
    assert len(djinn.get_graph().nodes()) == count > 1


def test_without_anything_captured_there_is_no_graph() -> None:
    djinn.init()
    with pytest.raises(NothingCapturedError):
        djinn.get_graph()
    pending = torch.ones(2, device=D)
    assert [node.operation for node in djinn.get_graph()] == [pending.operation]


def test_nodes_lead_to_their_neighbours_and_copies_stay_small() -> None:
    with djinn.capture():
        torch.ones(2).relu().sum()
    ones, relu, total = djinn.get_graph()
    assert (relu.predecessors, relu.successors) == ((ones,), (total,))
    assert relu.inputs[0].id == ones.id == relu.inputs[0].producer.id
    assert ones.outputs[0].readers == (relu,)
    copied = copy.deepcopy(relu)
    assert (copied.id, copied.operation, copied.inputs) == (relu.id, relu.operation, relu.inputs)
    assert type(copied.inputs[0]) is str
    assert relu.metadata.get("phase") is djinn.ExecutionPhase.FORWARD
    assert "meaning" not in relu.metadata


def test_factories_in_a_block_are_remote_and_those_in_a_disabled_one_are_not() -> None:
    numpy = pytest.importorskip("numpy")
    local = torch.ones(2)
    made = {
        "normal": lambda: torch.normal(0.0, 1.0, (2,)),
        "normal of tensors": lambda: torch.normal(torch.zeros(2), torch.ones(2)),
        "from_numpy": lambda: torch.from_numpy(numpy.ones(2)),
        "frombuffer": lambda: torch.frombuffer(bytearray(8), dtype=torch.int32),
        "tensor": lambda: torch.tensor([1, 2]),
        "zeros_like": lambda: torch.zeros_like(local),
    }
    for name, make in made.items():
        assert make().device.type == "cpu", name
        with djinn.capture():
            assert make().device == torch.device(D), name
            with djinn.disable_interception():
                assert make().device.type == "cpu", name
    assert djinn.get_current_context() is djinn.InterceptionContext.NONE


def test_a_tensor_knows_its_operation_while_it_is_pending(session: Any) -> None:
    x = LazyTensor.randn(3, 3)
    y = torch.add(x, x + 1, alpha=2)
    assert (x.operation, x.inputs, x.kwargs["dtype"]) == ("aten::randn", [3, 3], torch.float32)
    assert y.inputs[0] is x
    assert y.inputs[1].operation == "aten::add.Tensor"
    assert y.inputs[1].operation == "aten::add"
    assert y.kwargs == {"alpha": 2}
    made = LazyTensor(operation="aten::add", inputs=[x, 1])
    assert torch.equal(made.cpu(), x.cpu() + 1)
    assert (made.operation, made.inputs, dict(made.kwargs)) == ("", [], {})


def test_an_operation_equals_its_name_with_and_without_its_overload(tmp_path: Any) -> None:
    with djinn.capture() as captured:
        x = torch.ones(2, 3)
        (x + x).transpose(0, 1).add(1)
    read = djinn.AnnotatedGraph.from_dict(json.loads(json.dumps(captured.annotated.to_dict()))).graph
    for graph in (captured.graph, read, djinn.schedule(captured).graph):
        names = [node.operation for node in graph.nodes()]
        assert names == ["aten::ones", "aten::add.Tensor", "aten::transpose.int", "aten::add.Tensor"]
        assert names == ["aten::ones", "aten::add", "aten::transpose", "aten::add"]
        assert [str(name) for name in names[:2]] == ["aten::ones", "aten::add.Tensor"]
        assert (names[1].base, names[1].overload, names[0].overload) == ("aten::add", "Tensor", "")
        assert names[1] != "aten::sub"
        assert names[1] not in ("aten::ad", "aten::add.Scalar", "aten::add.", 3, None)
        assert "aten::add" in names
        assert {names[1]: 1}["aten::add.Tensor"] == 1
        for node in graph.nodes():
            match node.operation:
                case "aten::add":
                    break
        assert node.id == "n1"
    for suffix in ("json", "html", "graphml"):
        assert "aten::add.Tensor" in captured.annotated.export(tmp_path / f"graph.{suffix}").read_text()
    assert copy.deepcopy(names[1]) == names[1] == pickle.loads(pickle.dumps(names[1]))


def test_a_schedule_takes_the_fields_of_earlier_documents() -> None:
    with djinn.capture() as captured:
        x = torch.ones(2)
        y = x.exp()
    (ones, exp) = (node.id for node in captured.graph)
    schedule = djinn.ExecutionSchedule

    def of(devices: Any) -> Any:
        places = dict.fromkeys((ones, exp), devices[0].id)
        return schedule(places, [], [ones, exp], {exp: "persist"}, {devices[0].id: 1000}, False, True, False)

    class Earlier(SchedulerBase):
        def schedule(self, graph: Any) -> Any:
            return of(self.devices)

    scheduler_registry.register("earlier", Earlier)
    planned = djinn.schedule(captured, "earlier")
    assert planned.caching_policy == {captured.graph["n1"].outputs[0]: "persist"}
    assert (planned.scheduler, planned.memory_budget, planned.enable_compilation) == ("earlier", {D: 1000}, True)
    before = djinn.stats()["round_trips"]
    result = djinn.execute(planned)
    assert djinn.stats()["round_trips"] > before, "compiled waits until it has run"
    assert torch.equal(result[0].cpu(), y.cpu())
    named = schedule(execution_order=["a"], device_assignments={"a": D}, enable_pipelining=True)
    assert named == schedule(("a",), {"a": D}, flags=frozenset({"pipelining"}))
    for wrong, error in ((lambda: schedule({"a": D}, (), ("a",), enable_fusion=True), ScheduleError),
                         (lambda: schedule(("a",), {}, order=()), TypeError),
                         (lambda: schedule({}, (), (), {}, {}, False, False, False, ()), TypeError),
                         (lambda: schedule((), {}, caching_policy={"a": "sometimes"}), ValueError)):
        with pytest.raises(error):
            wrong()


def test_values_and_operations_of_earlier_documents_are_known() -> None:
    classify = OperationClassifier.classify
    assert classify("aten::unique") is djinn.OperationClass.SHAPE_DEPENDENT
    assert djinn.OperationClass("tuple_returning") is classify("aten::split")
    assert djinn.OperationClass("materialization") is classify("aten::item")
    assert djinn.OperationClass("shape_dependent") is classify("aten::nonzero")
    given = object()
    assert djinn.PatternMatch(pattern_name="x", confidence=1.0, matched_nodes=[], subgraph=given).subgraph() is given
    registry = OperationRegistry()
    registry.register("custom_op", lambda inputs, kwargs: inputs[0] * 2 + kwargs.get("bias", 0))
    assert registry.execute("custom_op", [torch.ones(2, device=D)], {"bias": 1}).tolist() == [3.0, 3.0]
    assert "custom_op" in registry
    for other, name in ((registry, "aten::nothing"), (OperationRegistry(), "custom_op")):
        assert name not in other
        with pytest.raises(UnknownOperatorError):
            other.get(name)


class Wide(djinn.PatternPlugin):
    name = "wide"
    max_fanout = 2
    expected_operations = frozenset({"relu"})

    def match(self, graph: Any) -> djinn.PatternMatch | None:
        return djinn.PatternMatch(pattern_name=self.name, confidence=0.5, matched_nodes=[])


@pytest.mark.parametrize(("limit", "value", "found"), [
    ("max_fanout", 2, 1), ("max_fanout", 1, 0), ("min_nodes", 3, 1), ("min_nodes", 4, 0), ("max_nodes", 3, 1),
    ("max_nodes", 2, 0), ("min_confidence", 0.5, 1), ("min_confidence", 0.6, 0), ("allows_cycles", False, 1),
    ("expected_operations", frozenset({"tanh"}), 0)])
def test_limits_of_patterns_are_kept(limit: str, value: Any, found: int) -> None:
    with djinn.capture():
        x = torch.ones(2)
        x.relu()
        x.sum()
    pattern = type("Limited", (Wide,), {limit: value})()
    assert len(djinn.PatternRegistry([pattern]).match_patterns(djinn.get_graph())) == found


def test_parts_of_a_graph_keep_their_limits(session: Any) -> None:
    x = LazyTensor.ones(8, 8)
    y = ((x @ x).relu() @ x).sum()
    builder = djinn.SmartSubgraphBuilder(djinn.FragmentationConfig(max_nodes=100, max_bytes=2 * 256))
    subgraph = builder.build(y)
    assert len(subgraph.fragments) > 1
    assert [node.id for part in subgraph.fragments for node in part.nodes] == [node.id for node in subgraph]
    made: set[str] = set()
    for part in subgraph.fragments:
        assert set(part.inputs) <= made
        made |= set(part.outputs)
    assert subgraph.execute().item() == 8 * 8 * 8 * 8
    with pytest.raises(NothingCapturedError):
        djinn.SubgraphBuilder().build(y)
