"""When a program is recorded, and which of its inputs are used where they are."""

from __future__ import annotations

import math

import pytest
import torch

from djinn.ir.program import Program
from djinn_conformance.programs import Recording, Ref, call, pieces
from djinn_plugins.common.calls.binding import bind
from djinn_plugins.executor.cuda.graph_eligibility import (
    MAX_STRIKES,
    RUNS_BEFORE_RECORDING,
    WORTH_REPLAYS,
    CaptureCandidate,
    GraphStage,
    can_be_recorded,
    changes_metadata,
    digest_of_numbers,
    form_of,
    storage_of,
    watched,
)

CPU = torch.device("cpu")


def program(*calls: object) -> Program:
    recording = Recording((torch.zeros(3, 3), torch.zeros(3, 3)), calls)  # type: ignore[arg-type]
    return pieces(recording, [], range(recording.results))[0].program


@pytest.mark.parametrize(("made", "expected"), [
    (call("aten::mm", Ref(-1), Ref(-2)), True),
    (call("aten::add_.Tensor", Ref(-1), Ref(-2), results=0), True),
    (call("aten::_local_scalar_dense", Ref(-1)), False),
    (call("aten::equal", Ref(-1), Ref(-2)), False),
    (call("aten::nonzero", Ref(-1)), False),
    (call("aten::t_", Ref(-1), results=0), False),
    (call("aten::resize_", Ref(-1), [2], results=0), False),
    (call("aten::add.out", Ref(-1), Ref(-2), out=Ref(-1), results=0), False),
])
def test_what_waits_or_changes_metadata_is_not_recorded(made: object, expected: bool) -> None:
    assert can_be_recorded(program(made, call("aten::neg", Ref(-1))), min_saved=-10) is expected


def test_programs_that_save_too_little_are_not_recorded() -> None:
    steps = tuple(call("aten::neg", Ref(-1)) for _ in range(10))
    recording = Recording((torch.zeros(3, 3),), steps)
    kept = [pieces(recording, [], range(count))[0].program for count in (0, 1, 2, 10)]
    assert [can_be_recorded(made) for made in kept] == [True, True, False, False]


def test_programs_that_turn_tensors_say_so() -> None:
    assert changes_metadata(program(call("aten::squeeze_", Ref(-1), results=0)))
    assert not changes_metadata(program(call("aten::squeeze", Ref(-1))))


@pytest.mark.parametrize(("one", "other"), [
    ([1], [1.0]), ([1], [True]), ([0.0], [-0.0]), ([[1, 2]], [[1], 2]), ([1 + 0j], [1]), ([2**70], [2**71]),
    ([math.inf], [-math.inf]),
])
def test_numbers_that_mean_something_else_differ(one: list[object], other: list[object]) -> None:
    assert digest_of_numbers(one) != digest_of_numbers(other)
    assert digest_of_numbers(one) == digest_of_numbers(list(one))


def test_a_number_that_is_none_repeats() -> None:
    assert digest_of_numbers([math.nan]) == digest_of_numbers([float("nan")])


def test_forms_tell_apart_what_kernels_tell_apart() -> None:
    tensor = torch.zeros(4, 4)
    others = [torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 5), tensor.t(), torch.zeros(17)[1:].view(4, 4)]
    assert len({form_of(value, CPU) for value in [tensor, *others]}) == 5
    assert form_of(torch.zeros(4, 4), CPU) == form_of(tensor, CPU)


@pytest.mark.parametrize("value", [3, None, torch.zeros(2, device="meta"), torch.eye(2).to_sparse(),
                                   torch.zeros(2, dtype=torch.complex64).conj(),
                                   torch.nn.Parameter(torch.zeros(2))])
def test_what_is_no_ordinary_tensor_has_no_form(value: object) -> None:
    assert form_of(value, CPU) is None


def test_writes_are_seen_through_views_and_lists() -> None:
    body = program(
        call("aten::select.int", Ref(-1), 0, 1),
        call("aten::neg", Ref(-2)),
        call("aten::_foreach_add_.List", [Ref(0), Ref(1)], [Ref(0), Ref(1)], results=0),
    )
    written: set[int] = set()
    one, other = torch.zeros(3, 3), torch.ones(3, 3)
    select, negate, add = watched(body, bind(body, CPU), written)
    row, negative = select.function(one, 0, 1), negate.function(other)
    assert written == set()
    add.function([row], [row])
    add.function([negative], [negative])
    assert written == {storage_of(one), storage_of(negative)}


def tensors(number: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(number)]


def stages(candidate: CaptureCandidate, inputs: list[torch.Tensor], runs: int) -> list[GraphStage]:
    return [candidate.observe(inputs) for _ in range(runs)]


def test_it_is_recorded_after_some_runs_and_a_rehearsal() -> None:
    candidate, inputs = CaptureCandidate(), tensors()
    assert stages(candidate, inputs, RUNS_BEFORE_RECORDING) == (
        [GraphStage.RUN] * (RUNS_BEFORE_RECORDING - 1) + [GraphStage.REHEARSE])
    candidate.rehearsed({0})
    assert candidate.observe(inputs) is GraphStage.RECORD
    assert candidate.changed == set()


def test_inputs_that_change_are_told_from_those_that_stay() -> None:
    candidate, (weight, _) = CaptureCandidate(), tensors()
    for _ in range(RUNS_BEFORE_RECORDING):
        candidate.observe([weight, torch.zeros(2)])
    candidate.rehearsed(())
    assert candidate.observe([weight, torch.zeros(2)]) is GraphStage.RECORD
    assert candidate.changed == {1}


def test_a_tensor_at_the_place_of_a_dead_one_is_another() -> None:
    candidate = CaptureCandidate()
    for _ in range(2):
        value = torch.zeros(2)
        candidate.observe([value])
        del value
    assert candidate.changed == {0}


def test_a_tied_input_that_changes_begins_anew() -> None:
    candidate, inputs = CaptureCandidate(), tensors()
    stages(candidate, inputs, RUNS_BEFORE_RECORDING)
    candidate.rehearsed({1})
    assert candidate.observe([inputs[0], torch.zeros(2)]) is GraphStage.RUN
    assert candidate.runs == 0
    assert candidate.changed == set()
    assert stages(candidate, inputs, RUNS_BEFORE_RECORDING)[-1] is GraphStage.REHEARSE


def test_what_is_never_worth_it_is_given_up() -> None:
    candidate = CaptureCandidate()
    for _ in range(MAX_STRIKES):
        assert not candidate.is_hopeless
        inputs = tensors()
        stages(candidate, inputs, RUNS_BEFORE_RECORDING)
        candidate.rehearsed({0})
        assert candidate.observe(inputs) is GraphStage.RECORD
        candidate.outgrown(tensors(), replays=WORTH_REPLAYS - 1)
    assert candidate.is_hopeless
    assert stages(candidate, inputs, 20) == [GraphStage.RUN] * 20


def test_what_was_worth_it_is_recorded_again() -> None:
    candidate = CaptureCandidate()
    for _ in range(2 * MAX_STRIKES):
        inputs = tensors()
        stages(candidate, inputs, RUNS_BEFORE_RECORDING)
        candidate.rehearsed({0})
        assert candidate.observe(inputs) is GraphStage.RECORD
        candidate.outgrown(tensors(), replays=WORTH_REPLAYS)
    assert not candidate.is_hopeless


def test_an_input_that_turned_out_to_change_is_remembered() -> None:
    candidate, inputs = CaptureCandidate(), tensors()
    stages(candidate, inputs, RUNS_BEFORE_RECORDING)
    candidate.rehearsed({0})
    candidate.observe(inputs)
    candidate.outgrown([inputs[0], torch.zeros(2)], replays=WORTH_REPLAYS)
    assert candidate.changed == {1}
