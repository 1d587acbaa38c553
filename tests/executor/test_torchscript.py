"""Programs whose segments PyTorch's own interpreter runs, compared with programs that Python runs."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recording.program_runs import Session, same, same_in_each_run, session, weights

from djinn.ir.program import Program
from djinn.wire.messages import Poisoned
from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, VIEWS, grouped
from djinn_conformance.programs import RecordedCall, Recording, Ref, call, pieces
from djinn_conformance.strategies import filled, recordings
from djinn_plugins.common.kinds.guard import CallCheck
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.torch import codegen, torchscript
from djinn_plugins.executor.torch.executor import TorchProgram

AFTER_RUNS = 1
"""Segments are used from the run after the first compiled one, which is the third run."""
LAYER = (call("aten::mm", Ref(-1), Ref(-2)), call("aten::relu", Ref(0)), call("aten::mul.Tensor", Ref(1), 0.5),
         call("aten::split.Tensor", Ref(2), 2, dim=1, results=2), call("aten::cat", [Ref(4), Ref(3)], 1),
         call("aten::sum.dim_IntList", Ref(5), [0], keepdim=True, dtype=torch.float64),
         call("aten::var_mean.correction", Ref(5), [1], correction=0, keepdim=False, results=2))


@attrs.define
class Used:
    """What became of the segments: how many steps are part of one, by operator, and how often one ran."""

    steps: Counter[str] = attrs.field(factory=Counter)
    runs: int = 0
    raises: bool = False

    def counting(self, segment: torchscript.GraphSegment) -> torchscript.GraphSegment:
        def function(*arguments: Any) -> Any:
            self.runs += 1
            if self.raises:
                raise RuntimeError("the graph cannot run")
            return segment.function(*arguments)

        return attrs.evolve(segment, function=function)


class PlainExecutor(CpuExecutor):
    """Runs programs from Python only."""

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> TorchProgram:
        made = super().compile_checked(program, checks)
        made.graphs = None
        return made


@pytest.fixture(scope="module")
def module_used() -> Iterator[Used]:
    used, find = Used(), torchscript.segments_of

    def segments_of(program: Program, calls: Sequence[Any]) -> list[torchscript.GraphSegment]:
        found = find(program, calls)
        for segment in found:
            used.steps.update(program.templates[step.template].operator
                              for step in program.steps[segment.first : segment.first + segment.steps])
        return [used.counting(segment) for segment in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codegen, "segments_of", segments_of)
        patch.setattr(codegen, "SEGMENTS_AFTER_RUNS", AFTER_RUNS)
        patch.setattr(codegen, "SMALL_STEP_NS", 10**12)
        patch.setattr(torchscript, "LEAST_STEPS", 1)
        yield used


@pytest.fixture
def used(module_used: Used) -> Used:
    module_used.steps, module_used.runs, module_used.raises = Counter(), 0, False
    return module_used


@settings(deadline=None)
@given(recording=recordings(grouped() + PLAIN + VIEWS + IN_PLACE + RANDOM, max_calls=10), every=st.integers(1, 3),
       replaced=st.sets(st.integers(0, 4)))
def test_runs_are_what_they_are_from_python(
    module_used: Used, recording: Recording, every: int, replaced: set[int]
) -> None:
    parts = pieces(recording, [], range(0, recording.results, every))
    same_in_each_run(Session(PlainExecutor(), parts), Session(CpuExecutor(), parts), recording, 4, replaced, set())


def pair(inputs: Sequence[torch.Tensor], *calls: RecordedCall) -> tuple[Session, Session]:
    return session(PlainExecutor(), inputs, *calls), session(CpuExecutor(), inputs, *calls)


def runs(plain: Session, native: Session, count: int = 4) -> None:
    for number in range(count):
        same(native.run(), plain.run(), f"run {number}")
    assert native.reports == plain.reports


def test_forms_of_arguments(used: Used) -> None:
    runs(*pair(weights(), *LAYER))
    assert used.steps.total() == len(LAYER)
    assert used.runs == 2


@pytest.mark.parametrize("number", [2, 2.5, 2j])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_a_number_in_place_of_a_tensor(used: Used, name: str, number: complex) -> None:
    """It does not promote a dtype as a tensor without dimensions would."""
    for tensor in (torch.tensor(3), torch.tensor([3], dtype=torch.int8), torch.tensor(0.1), torch.ones(2).bfloat16()):
        runs(*pair([tensor], call(f"aten::{name}.Tensor", Ref(-1), number), call("aten::clone", Ref(0))))
    assert used.steps[f"aten::{name}.Tensor"]


def test_a_step_that_raises_is_the_one_that_is_reported(used: Used) -> None:
    plain, native = pair(
        weights(), call("aten::mm", Ref(-1), Ref(-2)), call("aten::view", Ref(0), [16]), call("aten::neg", Ref(1)),
        call("aten::relu", Ref(0)), call("aten::add.Tensor", Ref(2), Ref(2)))
    for number in range(6):
        for each in (plain, native):
            each.give(0, filled((4, 4) if number != 4 else (2, 4), torch.float32, number))
        got, wanted = native.run(), plain.run()
        assert {index: type(value) for index, value in got.items()} == {
            index: type(value) for index, value in wanted.items()}
        same({3: got[3]}, {3: wanted[3]}, "the step that does not depend on it")
    assert native.reports == plain.reports == [(1, "RuntimeError")]
    assert used.runs == 4, "the segment did not stay"


def test_a_graph_that_cannot_run_is_given_up(used: Used) -> None:
    plain, native = pair(weights(), *LAYER)
    runs(plain, native, 2)
    used.raises = True
    runs(plain, native, 4)
    assert used.runs == 1
    assert native.reports == []


def test_nothing_that_has_effects_is_part_of_a_segment(used: Used) -> None:
    runs(*pair(weights(), call("aten::relu", Ref(-1)), call("aten::add_.Tensor", Ref(-2), Ref(0), results=0),
               call("aten::neg", Ref(0)), call("aten::neg", Ref(1))))
    assert set(used.steps) == {"aten::relu", "aten::neg"}


def test_random_numbers_are_drawn_once_though_a_later_step_raises(used: Used) -> None:
    plain, native = pair(
        weights(), call("aten::neg", Ref(-1)), call("aten::rand_like", Ref(-1)), call("aten::view", Ref(1), [16]),
        call("aten::neg", Ref(2)), call("aten::rand_like", Ref(-2)))
    for number in range(4):
        for each in (plain, native):
            each.give(0, filled((4, 4) if number != 3 else (2, 4), torch.float32, number))
        got, wanted = native.run(), plain.run()
        same({4: got[4]}, {4: wanted[4]}, f"run {number}")
    assert used.runs
    assert native.reports == plain.reports == [(2, "RuntimeError")]


def test_a_step_that_raises_is_reported_though_nobody_reads_its_result(used: Used) -> None:
    calls = (call("aten::neg", Ref(-1)), call("aten::relu", Ref(0)), call("aten::mm", Ref(-2), Ref(-1)))
    recording = Recording(weights(), calls)
    plain, native = (Session(executor, pieces(recording, [], [1])) for executor in (PlainExecutor(), CpuExecutor()))
    for number in range(4):
        for each in (plain, native):
            each.give(0, filled((4, 4) if number != 3 else (2, 4), torch.float32, number))
            each.give(1, weights()[1])
            each.run()
    assert used.runs
    assert native.reports == plain.reports == [(2, "RuntimeError")]


def test_a_call_that_is_checked_is_made_from_python(used: Used) -> None:
    part, = pieces(Recording(weights(), (call("aten::neg", Ref(-1)), call("aten::relu", Ref(0)))), [], [1])
    relu = next(index for index, each in enumerate(part.program.templates) if each.operator == "aten::relu")
    executor, checked = CpuExecutor(), list[Any]()
    program = executor.compile_checked(part.program, {relu: lambda args, kwargs: checked.append(args)})
    for _ in range(5):
        program.run([weights()[0]], list(part.numbers), executor.random_state(0), lambda step, error: Poisoned(step))
    assert len(checked) == 5
    assert set(used.steps) == {"aten::neg"}


def test_large_kernels_are_called_from_python(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "SMALL_STEP_NS", 0)
    runs(*pair(weights(), *LAYER))
    assert not used.steps


def test_graphs_of_an_executor_are_bounded(used: Used) -> None:
    executor = CpuExecutor()
    executor._graphs = torchscript.GraphBudget(2 * len(LAYER))
    sessions = [session(executor, weights(), *LAYER, call("aten::neg", Ref(number))) for number in range(3)]
    for each in sessions[:2]:
        for _ in range(4):
            each.run()
    assert used.steps.total() == len(LAYER) + 1, "the second one finds no room"
    del sessions[0], each
    gc.collect()
    for _ in range(4):
        sessions[1].run()
    assert used.steps.total() == 2 * (len(LAYER) + 1)


def test_a_release_without_the_interpreter(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    runs(*pair(weights(), *LAYER))
    assert not used.steps


def test_the_optimizations_of_the_process_stay_on(used: Used) -> None:
    runs(*pair(weights(), *LAYER))
    assert used.runs
    assert torch._C._get_graph_executor_optimize()


def test_a_small_cache_is_copied_by_a_segment_and_a_large_one_grows(used: Used) -> None:
    inputs = torch.ones(1, 2, 4, 16), torch.ones(1, 2, 1, 16)
    plain, native = pair(inputs, call("aten::neg", Ref(-2)), call("aten::relu", Ref(0)),
                         call("aten::cat", [Ref(-1), Ref(1)], 2))
    executor = native.executor
    assert isinstance(executor, CpuExecutor)
    rooms = executor.spare_room()
    rooms.admit(native.programs[0])
    runs(plain, native)
    assert used.steps["aten::cat"], "a copy from Python takes longer than the copy"
    for each in (plain, native):
        each.give(0, torch.ones(1, 2, 1100, 16))
    for number in range(6):
        caches = [each.run()[2] for each in (plain, native)]
        assert torch.equal(*caches)
        assert rooms.joined == number, "each run but the first writes behind the last cache"
        for each, cache in zip((plain, native), caches, strict=True):
            each.values[-1] = cache
    before = used.runs
    for each in (plain, native):
        each.give(0, inputs[0])
    runs(plain, native)
    assert used.runs == before + 4
    assert used.steps["aten::cat"] == 1, "both ways are known"
