"""The executor on a CUDA device: what is copied beside the computing, and programs that are played as graphs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models import cuda_training
from support.recording.program_runs import Session, same, session, weights

import djinn
from djinn.ir.program import Program
from djinn.plugins import Plugins
from djinn.wire.tensors import DTYPES
from djinn_conformance.assertions import bytes_of
from djinn_conformance.operations import IN_PLACE, PLAIN, RANDOM, VIEWS, grouped
from djinn_conformance.programs import RecordedCall, Recording, Ref, call, pieces
from djinn_conformance.strategies import filled, recordings
from djinn_plugins.common.calls.binding import bind
from djinn_plugins.executor.cuda.executor import CudaExecutor, CudaExecutorFactory
from djinn_plugins.executor.cuda.graph_eligibility import RUNS_BEFORE_RECORDING
from djinn_plugins.executor.cuda.overlapping import OverlappingCudaExecutor
from djinn_plugins.executor.cuda.recorded import RecordedProgram
from djinn_plugins.executor.cuda.staging_sizes import STAGING_BYTES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LONG_CYCLES = 200_000_000
"""For about a tenth of a second the device does nothing else."""


class RecordingCuda(OverlappingCudaExecutor):
    """Records the shortest programs, too."""

    def compile(self, program: Program) -> RecordedProgram:
        calls = bind(program, self._device)
        return RecordedProgram(program, calls, self._lock, self._device, self._shelf, min_saved=-len(program.keep) * 2)


@pytest.fixture
def executor() -> Iterator[RecordingCuda]:
    made = RecordingCuda(torch.device("cuda:0"))
    yield made
    made.close()


def plain() -> CudaExecutor:
    return CudaExecutor(torch.device("cuda:0"))


def test_the_factory_opens_it_if_told_so() -> None:
    assert type(CudaExecutorFactory().open("cuda")) is CudaExecutor
    plugins = Plugins.load(names=["djinn-executor-cuda"])
    plugins.configure({"cuda_overlap": "1"}, {})
    opened = plugins.find_executor("cuda").value.open("cuda")
    assert isinstance(opened, OverlappingCudaExecutor)
    assert opened.device == "cuda:0"
    opened.close()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", [(), (0, 3), (3, 5), (2, 3, 4)])
def test_every_dtype_goes_there_and_back(executor: RecordingCuda, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    count = torch.Size(size).numel() * dtype.itemsize
    tensor = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8).view(dtype).view(size)
    if len(size) == 2:
        tensor = tensor.t()
    value = executor.put(tensor)
    assert value.device == torch.device("cuda:0")
    assert (value.dtype, value.size(), value.stride()) == (tensor.dtype, tensor.size(), tensor.stride())
    back = executor.get(value)
    assert back.stride() == tensor.stride()
    assert not back.is_inference()
    assert bytes_of(back) == bytes_of(tensor)


@pytest.mark.parametrize("length", [STAGING_BYTES // 4 - 1, STAGING_BYTES // 4 + 1, STAGING_BYTES])
def test_large_tensors_go_in_pieces(executor: RecordingCuda, length: int) -> None:
    tensor = torch.arange(length, dtype=torch.int32)
    value = executor.put(tensor)
    kept = tensor.clone()
    tensor.zero_()
    assert torch.equal(value.sum(dtype=torch.int64).cpu(), kept.sum(dtype=torch.int64))
    assert torch.equal(executor.get(value), kept)


@pytest.mark.parametrize("view", ["expanded", "strided", "conjugated", "offset"])
def test_views_come_home_dense(executor: RecordingCuda, view: str) -> None:
    value = executor.put(filled((4, 6), torch.complex64, 1))
    views = {"expanded": value[:, :1].expand(4, 6), "strided": value[:, ::2], "conjugated": value.conj(),
             "offset": value[2:]}
    got = executor.get(views[view])
    assert torch.equal(got, views[view].cpu().resolve_conj())
    assert not got.is_conj()


def test_an_upload_waits_for_nothing_that_is_computed(executor: RecordingCuda) -> None:
    executor.get(executor.put(torch.zeros(10)))
    torch.cuda._sleep(LONG_CYCLES)
    value = executor.put(torch.ones(1000))
    assert not torch.cuda.current_stream().query()
    assert value.sum().item() == 1000


def test_what_is_computed_waits_for_the_upload(executor: RecordingCuda) -> None:
    for number in range(20):
        tensor = torch.full((5_000_000,), float(number))
        value = executor.put(tensor)
        tensor.fill_(-1.0)
        assert executor.get(value * 2)[-1].item() == 2.0 * number


def test_a_download_waits_for_what_is_computed(executor: RecordingCuda) -> None:
    value = executor.put(torch.zeros(1000))
    for number in range(5):
        torch.cuda._sleep(LONG_CYCLES // 4)
        value.add_(1)
        assert executor.get(value)[0].item() == number + 1


def test_memory_of_an_upload_is_not_used_again_too_soon(executor: RecordingCuda) -> None:
    sums = []
    for number in range(30):
        value = executor.put(torch.full((1_000_000,), float(number)))
        torch.cuda._sleep(LONG_CYCLES // 50)
        sums.append(value.sum())
        del value
    assert [made.item() for made in sums] == [1_000_000.0 * number for number in range(30)]


def long_program() -> tuple[RecordedCall, ...]:
    """Make a layer of a model: ten operations."""
    names = ("aten::relu", "aten::tanh", "aten::neg") * 3
    return (call("aten::mm", Ref(-1), Ref(-2)), *(call(name, Ref(step)) for step, name in enumerate(names)))


def test_a_program_that_repeats_is_played_and_its_results_stay(executor: RecordingCuda) -> None:
    used, other = session(executor, weights(), *long_program()), session(plain(), weights(), *long_program())
    results = []
    for number in range(20):
        for one in (used, other):
            one.give(1, filled((4, 4), torch.float32, number))
        results.append((used.run(), other.run()))
    assert executor.stats()["played"] == 20 - RUNS_BEFORE_RECORDING
    assert executor.stats()["not_recorded"] == 0
    for got, wanted in results:
        same(got, wanted, "results of earlier runs")


def test_a_cache_is_written_where_it_is(executor: RecordingCuda) -> None:
    calls = (call("aten::index_copy_", Ref(-1), 0, Ref(-2), Ref(-3), results=0), call("aten::sum", Ref(-1)),
             *[call("aten::neg", Ref(step)) for step in range(8)])
    inputs = torch.zeros(64, 8), torch.tensor([0]), torch.zeros(1, 8)
    used = session(executor, inputs, *calls)
    for text in range(3):
        used.give(0, torch.zeros(64, 8))
        for position in range(32):
            used.give(1, torch.tensor([position]))
            used.give(2, torch.full((1, 8), float(position + text)))
            result = used.run()
        assert torch.equal(executor.get(used.values[-1])[:32, 0], torch.arange(32.0) + text)
        assert executor.get(result[8]).item() == 8 * (sum(range(32)) + 32 * text)
    assert executor.stats()["recorded"] == 3
    assert executor.stats()["played"] >= 3 * (32 - RUNS_BEFORE_RECORDING - 1)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recording=recordings(grouped() + PLAIN + VIEWS + IN_PLACE + RANDOM, favoured=VIEWS + IN_PLACE, max_calls=10),
       every=st.integers(1, 3), replaced=st.sets(st.integers(0, 4)), at=st.sets(st.integers(0, 9), max_size=3))
def test_runs_are_what_they_are_without_graphs(
    executor: RecordingCuda, recording: Recording, every: int, replaced: set[int], at: set[int]
) -> None:
    parts = pieces(recording, [], range(0, recording.results, every))
    other, used = Session(plain(), parts), Session(executor, parts)
    before: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for number in range(8):
        for index, tensor in enumerate(recording.inputs):
            if number == 0 or index in replaced or number in at:
                other.give(index, tensor)
                used.give(index, tensor)
        before.append((used.run(), other.run()))
        same(used.values, other.values, f"inputs after run {number} of {recording}")
        assert used.reports == other.reports
        for earlier, (theirs, ours) in enumerate(before):
            same(theirs, ours, f"results of run {earlier} after run {number} of {recording}")


def waiting_program() -> tuple[RecordedCall, ...]:
    """Make a program that looks at values where no tag of PyTorch says so: how many a mask selects."""
    return (call("aten::gt.Scalar", Ref(-1), 0), call("aten::index_put_", Ref(-1), [Ref(0)], Ref(-2), results=0),
            call("aten::neg", Ref(-1)))


def test_a_capture_that_fails_leaves_everything_as_it_was(executor: RecordingCuda) -> None:
    inputs = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([3.0, 4.0])
    used, other = session(executor, inputs, *waiting_program()), session(plain(), inputs, *waiting_program())
    drawing = session(executor, (torch.zeros(100),), call("aten::rand_like", Ref(-1)))
    same_drawing = session(plain(), (torch.zeros(100),), call("aten::rand_like", Ref(-1)))
    for number in range(12):
        same(used.run(), other.run(), f"run {number}")
        same(drawing.run(), same_drawing.run(), f"random numbers of run {number}")
    assert executor.stats()["not_recorded"] == 1
    assert executor._shelf.recorder.is_usable
    again = session(executor, weights(), *long_program())
    for _ in range(8):
        again.run()
    assert executor.stats()["played"] > 0


def test_memory_comes_back_after_a_capture_that_failed(executor: RecordingCuda) -> None:
    used = session(executor, (torch.tensor([1.0, -1.0, 2.0]), torch.tensor([3.0, 4.0])), *waiting_program())
    for _ in range(8):
        used.run()
    assert executor.stats()["not_recorded"] == 1
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(50):
        executor.put(torch.zeros(2_000_000)).add_(1)
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < 100 * 2**20
    torch.cuda.empty_cache()


def test_memory_of_graphs_comes_back(executor: RecordingCuda) -> None:
    used = session(executor, (torch.ones(512, 512), torch.ones(512, 512)), *long_program())
    for _ in range(8):
        used.run()
    assert executor.stats()["recording_bytes"] >= 512 * 512 * 4
    del used
    gc.collect()
    assert executor.stats()["recordings"] == executor.stats()["recording_bytes"] == 0


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_random_numbers_are_those_of_every_run(executor: RecordingCuda, probability: float) -> None:
    tensor = filled((1, 1, 8, 8), torch.float32, 1)
    attention = call("aten::scaled_dot_product_attention", Ref(-1), Ref(-1), Ref(-1), None, probability)
    used, other = session(executor, (tensor,), attention), session(plain(), (tensor,), attention)
    for number in range(10):
        same(used.run(), other.run(), f"run {number}")
    assert torch.equal(used.random.get(), other.random.get())


def test_a_model_is_trained_and_used_as_on_the_device_itself() -> None:
    # PyTorch cannot go backward on CUDA in a process with a device of another kind (pytorch/pytorch#161129).
    done = subprocess.run([sys.executable, cuda_training.__file__, "cuda:0"], capture_output=True, text=True,
                          timeout=120, check=True)
    djinn.init(device="cuda:0")
    try:
        got = cuda_training.losses("remote_accelerator:0")
    finally:
        djinn.shutdown()
    assert got == pytest.approx(json.loads(done.stdout), rel=1e-6)
