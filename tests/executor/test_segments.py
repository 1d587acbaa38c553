"""Programs that are recorded in segments, with a recorder for the CPU in place of CUDA's graphs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recording.cpu import CpuRecorder, RecordingExecutor
from support.recording.program_runs import Session, same, same_in_each_run, session, weights

from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, VIEWS, grouped
from djinn_conformance.programs import RecordedCall, Recording, Ref, call, pieces
from djinn_conformance.strategies import filled, recordings
from djinn_plugins.common.calls.binding import bind
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.cuda.recorded import RecordedProgram
from djinn_plugins.executor.cuda.segment_runs import PATIENCE_RUNS
from djinn_plugins.executor.cuda.segments import cut

RUNS = 12
_READ = call("aten::equal", Ref(-1), Ref(-1))


def segments(used: Session) -> list[Any]:
    program, = used.programs
    assert isinstance(program, RecordedProgram)
    return program.segments


def both(inputs: Sequence[torch.Tensor], *calls: RecordedCall, every: int = 1) -> tuple[Session, Session]:
    """The same on an executor that records segments, and on one that records nothing."""
    executors = RecordingExecutor(whole=False), CpuExecutor()
    recorded, plain = (session(executor, inputs, *calls, every=every) for executor in executors)
    return recorded, plain


def give(index: int, tensor: torch.Tensor, *sessions: Session) -> None:
    for one in sessions:
        one.give(index, tensor)


@settings(deadline=None)
@given(recording=recordings(grouped() + PLAIN + VIEWS + IN_PLACE + RANDOM, favoured=VIEWS + IN_PLACE + PLAIN,
                            max_calls=12),
       every=st.integers(1, 3), cuts=st.lists(st.integers(1, 9), max_size=1),
       replaced=st.sets(st.integers(0, 4)), at=st.sets(st.integers(0, RUNS), max_size=3))
def test_runs_are_what_they_are_without_segments(
    recording: Recording, every: int, cuts: list[int], replaced: set[int], at: set[int]
) -> None:
    """Some inputs are new in every run, some now and then, some always the same, and written."""
    parts = pieces(recording, [at for at in cuts if at < len(recording.calls)], range(0, recording.results, every))
    plain, recorded = Session(CpuExecutor(), parts), Session(RecordingExecutor(whole=False), parts)
    same_in_each_run(plain, recorded, recording, RUNS, replaced, at)


_DECODING = (
    call("aten::mm", Ref(-1), Ref(-2)), call("aten::relu", Ref(0)), call("aten::mul_.Scalar", Ref(1), 0.5, results=0),
    call("aten::cat", [Ref(-3), Ref(1)], 0),
    call("aten::mm", Ref(1), Ref(-2)), call("aten::sum.dim_IntList", Ref(2), [0], True),
    call("aten::add.Tensor", Ref(3), Ref(4)), call("aten::add_.Tensor", Ref(1), Ref(4), results=0),
    call("aten::mm", Ref(5), Ref(-2)), call("aten::neg", Ref(6)), call("aten::t", Ref(1)),
    call("aten::equal", Ref(6), Ref(7)),
    call("aten::sub.Tensor", Ref(7), Ref(1)), call("aten::abs", Ref(10)),
)
"""A cache that grows, something that reads it, and a value that is read, with other steps between."""


def decoded(used: Session, runs: int) -> list[dict[int, Any]]:
    results = []
    for number in range(runs):
        used.give(0, filled((4, 4), torch.float32, number))
        results.append(used.run())
        used.values[-3] = results[-1][2]
    return results


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_cache_that_grows_stays_between_recorded_segments(every: int) -> None:
    inputs = (*weights(), filled((2, 4), torch.float32, 3))
    recorded, plain = both(inputs, *_DECODING, every=every if every == 1 else 2)
    for theirs, ours in zip(decoded(recorded, RUNS), decoded(plain, RUNS), strict=True):
        same(theirs, ours, "decoding")
    found = segments(recorded)
    assert [(one.segment.begin, one.segment.end) for one in found] == [(0, 3), (4, 5), (6, 11), (12, 14)]
    assert all(player.is_played for player in found)


def test_values_between_segments_stay_where_they_are() -> None:
    recorded, plain = both(weights(), call("aten::mm", Ref(-1), Ref(-2)), _READ, call("aten::neg", Ref(0)), every=9)
    for number in range(RUNS):
        give(0, filled((4, 4), torch.float32, number), recorded, plain)
        same(recorded.run(), plain.run(), f"run {number}")
    first, second = segments(recorded)
    assert first.is_played
    assert second.is_played
    shelf = recorded.executor.shelf  # type: ignore[attr-defined]
    copies = [recording()._copied for recording in shelf._recordings]
    assert [len(copied) for copied in copies] == [1, 0], "only the program's own input is copied"


def test_a_segment_that_is_recorded_again_lets_later_ones_be_recorded_again() -> None:
    """One that was recorded earlier may use the memory of its new results."""
    calls = (call("aten::mm", Ref(-1), Ref(-2)), _READ, call("aten::neg", Ref(-2)), _READ,
             call("aten::add.Tensor", Ref(0), Ref(2)))
    recorded, plain = both(weights(), *calls)
    for number in range(3 * RUNS):
        if not number % RUNS:
            give(0, filled((4, 4), torch.float32, number), recorded, plain)
        same(recorded.run(), plain.run(), f"run {number}")
    assert all(player.is_played for player in segments(recorded))
    assert recorded.executor.shelf.stats()["recorded"] > 3  # type: ignore[attr-defined]


def test_a_write_reaches_results_of_earlier_segments() -> None:
    calls = (call("aten::mm", Ref(-1), Ref(-2)), call("aten::t", Ref(0)), _READ,
             call("aten::add_.Scalar", Ref(1), 3, results=0), _READ, call("aten::zero_", Ref(-2), results=0),
             call("aten::mul_.Scalar", Ref(0), 2, results=0))
    recorded, plain = both(weights(), *calls)
    for number in range(RUNS):
        give(1, filled((4, 4), torch.float32, number), recorded, plain)
        got, wanted = recorded.run(), plain.run()
        same(got, wanted, f"run {number}")
        assert got[0].untyped_storage()._cdata == got[1].untyped_storage()._cdata
        same(recorded.values, plain.values, f"inputs after run {number}")
    assert any(player.is_played for player in segments(recorded))


@pytest.mark.parametrize("whole", [False, True])
def test_results_that_are_the_same_tensor_stay_so(whole: bool) -> None:
    """`lift_fresh` returns its operand, so that what resizes the one resizes the other."""
    used = session(RecordingExecutor(whole=whole), weights(), call("aten::neg", Ref(-1)),
                   call("aten::lift_fresh", Ref(0)), call("aten::abs", Ref(0)))
    for _ in range(RUNS):
        got = used.run()
        assert got[0] is got[1]
        assert got[2] is not got[0]
    shelf = used.executor.shelf  # type: ignore[attr-defined]
    assert shelf.stats()["played"]


def test_a_step_that_raises_poisons_what_depends_on_it_and_nothing_else() -> None:
    """The failing step is now between segments, now within one."""
    calls = (call("aten::neg", Ref(-1)), call("aten::abs", Ref(0)), _READ,
             call("aten::index_select", Ref(1), 0, Ref(-2)), call("aten::exp", Ref(1)),
             call("aten::add_.Tensor", Ref(1), Ref(3), results=0), _READ, call("aten::relu", Ref(3)),
             call("aten::tanh", Ref(4)))
    inputs = weights()[0], torch.tensor([0, 1, 1, 0])
    recorded, plain = both(inputs, *calls)
    for number in range(2 * RUNS):
        index = [99] if number in (1, 4, RUNS, RUNS + 3) else [number % 4] if number > RUNS else [1]
        give(1, torch.tensor(index * 4), recorded, plain)
        same(recorded.run(), plain.run(), f"run {number}")
        same(recorded.values, plain.values, f"inputs after run {number}")
        assert recorded.reports == plain.reports
    assert len(plain.reports) == 4


def test_poisoned_inputs_and_cancelled_runs() -> None:
    from djinn.wire.messages import Poisoned

    calls = (call("aten::mm", Ref(-1), Ref(-1)), call("aten::neg", Ref(0)), _READ, call("aten::neg", Ref(-2)))
    recorded, plain = both(weights(), *calls)
    for number in range(RUNS):
        for one in (recorded, plain):
            one.values[-2] = Poisoned(3) if number == RUNS - 2 else weights()[1]
        same(recorded.run(), plain.run(), f"run {number}")
    assert any(player.is_played for player in segments(recorded))
    reasons: list[list[tuple[int, str]]] = []
    for one in (recorded, plain):
        told: list[tuple[int, str]] = []
        program, = one.programs
        reason = InterruptedError("enough")

        def report(step: int, error: BaseException, told: list[tuple[int, str]] = told) -> Poisoned:
            told.append((step, str(error)))
            return Poisoned(5)

        outputs = program.run_until([reason], [one.values[-1], one.values[-2]], list(one.parts[0].numbers),  # type: ignore[attr-defined]
                                    one.random, report)
        assert all(isinstance(value, Poisoned) for value in outputs)
        reasons.append(told)
    assert reasons[0] == reasons[1] == [(0, "enough")]


def test_what_draws_random_numbers_stays_between() -> None:
    calls = (call("aten::neg", Ref(-1)), call("aten::rand_like", Ref(0)), call("aten::mul.Tensor", Ref(0), Ref(1)))
    recorded, plain = both(weights()[:1], *calls)
    for number in range(RUNS):
        same(recorded.run(), plain.run(), f"run {number}")
    assert torch.equal(recorded.random.get(), plain.random.get())
    assert [player.segment.begin for player in segments(recorded)] == [0, 2]
    assert all(player.is_played for player in segments(recorded))


@pytest.mark.parametrize("number", [0.0, 0.5])
def test_attention_that_drops_is_not_replayed(number: float) -> None:
    dropout = call("aten::scaled_dot_product_attention", Ref(-1), Ref(-1), Ref(-1), None, 0.0)
    recorded, plain = both((filled((1, 1, 8, 8), torch.float32, 1),), dropout, call("aten::neg", Ref(0)))
    for run in range(RUNS + 4):
        given = [0.0 if run < RUNS else number]
        same(recorded.run(given), plain.run(given), f"run {run}")
    assert torch.equal(recorded.random.get(), plain.random.get())
    assert segments(recorded)[0].is_played is not bool(number)


def test_steps_that_change_after_all_leave_their_segment() -> None:
    """A number that differs only from the fifth run on."""
    calls = (call("aten::neg", Ref(-1)), call("aten::mul.Scalar", Ref(0), 2), call("aten::abs", Ref(1)))
    recorded, plain = both(weights()[:1], *calls)
    for number in range(4 + PATIENCE_RUNS + 2 * RUNS):
        given = [2 if number < 4 else number]
        same(recorded.run(given), plain.run(given), f"run {number}")
    assert [(one.segment.begin, one.segment.end) for one in segments(recorded)] == [(0, 1), (2, 3)]
    assert all(player.is_played for player in segments(recorded))


def test_what_cannot_be_recorded_runs_and_is_tried_once() -> None:
    executor = RecordingExecutor(CpuRecorder(refuses=True), whole=False)
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)), _READ)
    for _ in range(3 * RUNS):
        assert torch.equal(used.run()[0], weights()[0] @ weights()[1])
    assert executor.recorder.tries == 1


def test_recordings_go_with_their_program() -> None:
    recorded, _ = both(weights(), call("aten::mm", Ref(-1), Ref(-2)), _READ, call("aten::neg", Ref(0)))
    for _ in range(RUNS):
        recorded.run()
    shelf = recorded.executor.shelf  # type: ignore[attr-defined]
    assert shelf.stats()["recordings"] == 2
    recorded.programs.clear()
    gc.collect()
    assert shelf.stats()["recordings"] == shelf.size_bytes == 0


def test_segments_read_and_keep_what_the_whole_program_does() -> None:
    calls = (call("aten::neg", Ref(-1)), call("aten::abs", Ref(0)), _READ, call("aten::add.Tensor", Ref(0), Ref(-2)))
    part, = pieces(Recording(weights(), calls), [], [3])
    bound = bind(part.program, torch.device("cpu"))
    one, = cut(part.program, bound, [True, True, False, True], least_steps=2)
    assert (one.begin, one.end, one.inputs, one.outputs, one.numbers) == (0, 2, (-1,), (0,), 0)
    assert not cut(part.program, bound, [True, False, True, False], least_steps=2)
