"""Programs that are recorded when they repeat, with a recorder for the CPU in place of CUDA's graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recording.cpu import CpuRecorder, CpuTake, RecordingExecutor
from support.recording.program_runs import Session, same, same_in_each_run, session, weights

from djinn.ir.program import Program
from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, VIEWS, grouped
from djinn_conformance.programs import Recording, Ref, call, pieces
from djinn_conformance.strategies import filled, recordings
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.cuda.graph_eligibility import MAX_STRIKES, RUNS_BEFORE_RECORDING
from djinn_plugins.executor.cuda.recorded import PATIENCE_RUNS
from djinn_plugins.executor.torch.growing import GrowingValues

RUNS_UNTIL_PLAYED = RUNS_BEFORE_RECORDING + 1


@settings(deadline=None)
@given(recording=recordings(grouped() + PLAIN + VIEWS + IN_PLACE + RANDOM, favoured=VIEWS + IN_PLACE, max_calls=10),
       every=st.integers(1, 3), cuts=st.lists(st.integers(1, 9), max_size=1),
       replaced=st.sets(st.integers(0, 4)), at=st.sets(st.integers(0, 9), max_size=3))
def test_runs_are_what_they_are_without_recording(
    recording: Recording, every: int, cuts: list[int], replaced: set[int], at: set[int]
) -> None:
    """Some inputs are new in every run, some now and then, some always the same, and written."""
    parts = pieces(recording, [cut for cut in cuts if cut < len(recording.calls)], range(0, recording.results, every))
    plain, recorded = Session(CpuExecutor(), parts), Session(RecordingExecutor(), parts)
    same_in_each_run(plain, recorded, recording, 10, replaced, at)


def test_a_program_that_repeats_is_played() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)), call("aten::relu", Ref(0)))
    results = []
    for number in range(10):
        used.give(1, filled((4, 4), torch.float32, number))
        results.append(used.run())
    assert executor.shelf.stats()["played"] == 10 - RUNS_BEFORE_RECORDING
    for number, result in enumerate(results):
        assert torch.equal(result[1], torch.relu(weights()[0] @ filled((4, 4), torch.float32, number)))


def test_what_is_written_is_the_real_value() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::add_.Tensor", Ref(-1), Ref(-2), results=0),
                   call("aten::neg", Ref(-1)))
    cache = used.values[-1]
    for _ in range(10):
        used.give(1, torch.ones(4, 4))
        result = used.run()
    assert executor.shelf.stats()["played"] > 0
    wanted = weights()[0]
    for _ in range(10):
        wanted = wanted + 1
    assert torch.equal(cache, wanted)
    assert torch.equal(result[0], -wanted)


def test_another_cache_is_recorded_anew() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::add_.Tensor", Ref(-1), Ref(-2), results=0))
    for _ in range(3):
        used.give(0, torch.zeros(4, 4))
        for _ in range(20):
            used.run()
        assert torch.allclose(used.values[-1], 20 * weights()[1])
    assert executor.shelf.stats()["recorded"] == 3


@pytest.mark.parametrize("is_new", [True, False])
def test_statistics_of_batch_norms_are_written(is_new: bool) -> None:
    calls = (call("aten::native_batch_norm", Ref(-1), None, None, Ref(-2), Ref(-3), True, 0.5, 1e-5, results=3),
             call("aten::neg", Ref(-2)))
    inputs = filled((4, 3), torch.float32, 1), torch.zeros(3), torch.ones(3)
    used, plain = session(RecordingExecutor(), inputs, *calls), session(CpuExecutor(), inputs,
                                                                        *calls)
    for number in range(10):
        for one in (used, plain):
            one.give(0, filled((4, 3), torch.float32, number))
            if is_new:
                one.give(1, torch.zeros(3))
        same(used.run(), plain.run(), f"run {number}")
        same(used.values, plain.values, f"inputs after run {number}")
    assert (used.executor.shelf.stats()["played"] > 0) is not is_new  # type: ignore[attr-defined]


def test_a_cache_that_is_always_another_is_given_up() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::add_.Tensor", Ref(-1), Ref(-2), results=0),
                   call("aten::neg", Ref(-1)))
    for _ in range(30):
        used.give(0, torch.zeros(4, 4))
        assert torch.equal(used.run()[0], -weights()[1])
    assert executor.recorder.tries == 0


@pytest.mark.parametrize("runs", [RUNS_UNTIL_PLAYED - 1, RUNS_UNTIL_PLAYED + 2])
def test_an_input_that_shows_what_is_written_is_not_copied(runs: int) -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::zero_", Ref(-1), results=0),
                   call("aten::mul.Tensor", Ref(-2), Ref(-2)))
    for number in range(runs):
        used.give(1, filled((4, 4), torch.float32, number))
        used.run()
    assert executor.shelf.stats()["played"] == max(0, runs - RUNS_BEFORE_RECORDING)
    used.values[-1].fill_(5.0)
    used.values[-2] = used.values[-1].view(4, 4)
    assert torch.equal(used.run()[0], torch.zeros(4, 4))


def test_results_that_are_views_of_an_input_are_views_of_it() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::select.int", Ref(-1), 0, 1), call("aten::neg", Ref(-2)))
    for _ in range(8):
        result = used.run()
    assert executor.shelf.stats()["played"] > 0
    assert result[0].untyped_storage()._cdata == used.values[-1].untyped_storage()._cdata
    assert result[0].storage_offset() == 4


def test_results_that_share_memory_go_on_sharing_it() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)), call("aten::t", Ref(0)))
    for _ in range(8):
        result = used.run()
    assert executor.shelf.stats()["played"] > 0
    with torch.inference_mode():
        result[0].zero_()
    assert not result[1].any()


def test_what_cannot_be_recorded_runs_and_is_tried_once() -> None:
    executor = RecordingExecutor(CpuRecorder(refuses=True))
    used = session(executor, weights(), call("aten::add_.Tensor", Ref(-1), Ref(-2), results=0))
    for _ in range(12):
        used.run()
    wanted = weights()[0]
    for _ in range(12):
        wanted = wanted + weights()[1]
    assert torch.equal(used.values[-1], wanted)
    assert executor.recorder.tries == 1
    assert executor.shelf.stats()["not_recorded"] == 1


def test_other_numbers_are_not_played() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mul.Scalar", Ref(-1), 2))
    for _ in range(8):
        used.run([2])
    assert executor.shelf.stats()["played"] > 0
    for number in (3, 2.5, True, 2.0, 2):
        assert torch.equal(used.run([number])[0], weights()[0] * number)


@pytest.mark.parametrize(("probability", "is_played"), [(0.0, True), (0.5, False)])
def test_only_what_draws_nothing_is_played(probability: float, is_played: bool) -> None:
    dropout = call("aten::scaled_dot_product_attention", Ref(-1), Ref(-1), Ref(-1), None, probability)
    tensor = filled((1, 1, 8, 8), torch.float32, 1)
    executor = RecordingExecutor()
    recorded = session(executor, (tensor,), dropout)
    plain = session(CpuExecutor(), (tensor,), dropout)
    for _ in range(10):
        same(recorded.run(), plain.run(), "attention")
    assert torch.equal(recorded.random.get(), plain.random.get())
    assert (executor.shelf.stats()["played"] > 0) is is_played


def test_tensors_that_are_turned_in_place_are_noticed() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)))
    turning = session(executor, weights()[:1], call("aten::t_", Ref(-1), results=0))
    turning.values = used.values
    for _ in range(8):
        used.run()
    assert executor.shelf.stats()["played"] > 0
    turning.run()
    assert torch.equal(used.run()[0], weights()[0].t() @ weights()[1])


def test_a_result_that_is_an_input_stays_that_input() -> None:
    executor = RecordingExecutor()
    given = session(executor, weights(), call("aten::lift_fresh", Ref(-1)), call("aten::neg", Ref(-2)), every=2)
    for _ in range(8):
        assert given.run()[0] is given.values[-1]


def test_a_program_with_a_step_that_raises_is_not_recorded() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::cholesky_inverse", Ref(-1)), call("aten::neg", Ref(-2)),
                   call("aten::mm", Ref(-1), Ref(-2)))
    failing = session(executor, (torch.zeros((2,) * 9), *weights()), call("aten::neg", Ref(-2)),
                      call("aten::mm", Ref(-1), Ref(-2)))
    for _ in range(8):
        used.run()
        failing.run()
    assert executor.shelf.stats()["recorded"] == 1
    assert failing.reports == [(1, "RuntimeError")] * 8


def test_recordings_keep_no_input_alive() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)))
    for _ in range(8):
        used.run()
    assert executor.shelf.stats()["recordings"] == 1
    # A graph keeps addresses where the CPU's recording keeps what it runs.
    executor.recorder.latest.forget()
    gone = [weakref.ref(used.values.pop(index)) for index in (-1, -2)]
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_recordings_go_with_their_program() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)))
    for _ in range(8):
        used.run()
    assert executor.shelf.size_bytes > 0
    used.programs.clear()
    gc.collect()
    assert executor.shelf.stats()["recordings"] == executor.shelf.size_bytes == 0


def test_the_least_recently_played_goes_first() -> None:
    executor = RecordingExecutor(limit=2)
    first, second, third = (session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2))) for _ in range(3))
    for used in (first, second):
        for _ in range(20):
            used.run()
    first.run()
    for _ in range(RUNS_UNTIL_PLAYED):
        third.run()
    assert executor.shelf.stats()["recordings"] == 2
    plays = executor.shelf.stats()["played"]
    first.run()
    assert executor.shelf.stats()["played"] == plays + 1
    assert torch.equal(second.run()[0], weights()[0] @ weights()[1])
    assert executor.shelf.stats()["played"] == plays + 1


def test_recordings_are_bounded_in_bytes() -> None:
    executor = RecordingExecutor(CpuRecorder(limit_bytes=150))
    used = [session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2))) for _ in range(4)]
    large = session(executor, (filled((8, 8), torch.float32, 1),), call("aten::neg", Ref(-1)))
    for one in (*used, large):
        for _ in range(RUNS_UNTIL_PLAYED):
            one.run()
        assert 0 < executor.shelf.size_bytes <= 150
    assert executor.shelf.stats()["not_recorded"] == 1
    assert torch.equal(large.run()[0], -filled((8, 8), torch.float32, 1))


def test_a_program_that_never_repeats_is_soon_left_alone() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mul.Scalar", Ref(-1), 2))
    for number in range(PATIENCE_RUNS + MAX_STRIKES * RUNS_UNTIL_PLAYED):
        assert torch.equal(used.run([number])[0], weights()[0] * number)
    assert executor.recorder.tries == 0


def test_closed_recordings_are_not_played() -> None:
    executor = RecordingExecutor()
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)))
    for _ in range(8):
        used.run()
    executor.shelf.close()
    plays = executor.shelf.stats()["played"]
    assert torch.equal(used.run()[0], weights()[0] @ weights()[1])
    assert executor.shelf.stats()["played"] == plays


def test_a_program_in_which_values_grow_is_not_recorded_whole() -> None:
    """A replay would join in the device's memory only, and not keep account of the room there."""
    caches = (filled((1, 4, 256, 64), torch.float32, 1), filled((1, 4, 1, 64), torch.float32, 2))
    join = call("aten::cat", [Ref(-1), Ref(-2)], 2)
    executor, room = RecordingExecutor(), GrowingValues(threading.RLock())
    used = session(executor, caches, join)
    room.admit(used.programs[0])
    for number in range(1, 10):
        used.values[-1] = used.run()[0]
        assert used.values[-1].shape[2] == 256 + number
    assert torch.equal(used.values[-1], torch.cat([caches[0], *[caches[1]] * 9], 2))
    assert room.joined == 8
    assert executor.shelf.stats()["recorded"] == 0


class FreeingExecutor(RecordingExecutor):
    """Frees its recordings where there is no memory, as on CUDA."""

    def options(self, program: Program) -> dict[str, Any]:
        return {**super().options(program), "relieve": self.shelf.close}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."),
                                   RuntimeError("CUDA error: out of memory")], ids=["allocator", "graph"])
def test_a_recording_that_there_is_no_memory_to_play_runs_step_by_step(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, whole: bool
) -> None:
    def fail(_: CpuTake) -> None:
        raise error

    calls = call("aten::mm", Ref(-1), Ref(-2)), call("aten::add_.Tensor", Ref(-2), 1, results=0)
    used, plain = (session(one, weights(), *calls) for one in (FreeingExecutor(whole=whole), CpuExecutor()))
    for number in range(20):
        with monkeypatch.context() as patch:
            if number == 12:
                assert used.executor.shelf.size_bytes  # type: ignore[attr-defined]  # it records
                patch.setattr(CpuTake, "play", fail)
            same(used.run(), plain.run(), f"run {number}")
        same(used.values, plain.values, f"inputs after run {number}")
        assert number != 12 or not used.executor.shelf.size_bytes  # type: ignore[attr-defined]  # as above
    assert used.reports == []


@pytest.mark.parametrize("whole", [True, False])
def test_results_of_a_recording_are_copied_into_memory_that_recordings_give_up(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    copies, clone = list[torch.Tensor](), torch.Tensor.clone

    def fail_once(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor)
        if len(copies) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return clone(tensor)

    executor = FreeingExecutor(whole=whole)
    used = session(executor, weights(), call("aten::mm", Ref(-1), Ref(-2)), call("aten::relu", Ref(0)))
    wanted = [used.run() for _ in range(12)][-1]
    monkeypatch.setattr(torch.Tensor, "clone", fail_once)
    got = used.run()
    monkeypatch.undo()
    same(got, wanted, "a run without memory")
    assert len(copies) > 1
    assert executor.shelf.size_bytes == 0
