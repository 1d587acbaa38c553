"""What is decided about CUDA devices before CUDA starts: which one a process sees, and how much of it it may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import pytest
import torch
from support.recording.cpu import CpuRecorder
from support.recording.program_runs import session, weights

from djinn.errors import ConfigurationError
from djinn.plugins import Plugins
from djinn_conformance.programs import Ref, call
from djinn_plugins.common.memory.usage import MemoryUsage
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.cuda import executor as cuda
from djinn_plugins.executor.cuda import overlapping, visible
from djinn_plugins.executor.cuda.executor import ALLOCATOR, CudaExecutorFactory, within
from djinn_plugins.executor.cuda.recorded import RecordedProgram
from djinn_plugins.executor.cuda.settings import CudaSettings
from djinn_plugins.server.memory import MIN_KEPT_BYTES, SpareMemory, device_bytes
from djinn_plugins.server.sandbox.paths import files_for

GIB = 2**30
INSTANCES = "MIG-0aa1,MIG-0bb2"


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let PyTorch pass for one that is built for CUDA and finds two devices, and let it fail to start CUDA."""
    def start() -> None:
        raise AssertionError("CUDA is started")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    monkeypatch.delenv(visible.VISIBLE, raising=False)
    return monkeypatch


@pytest.mark.parametrize(("given", "device", "entry"), [
    (None, "cuda:0", "0"), (None, "cuda:3", "3"), (None, "cuda", "0"), ("2, 5", "cuda:1", "5"),
    ("GPU-1f,GPU-2e", "cuda:1", "GPU-2e"), (INSTANCES, "cuda:1", "MIG-0bb2"),
    ("2", "cuda:1", ""), ("", "cuda:0", ""), (None, "cpu", ""), (None, "cuda:x", ""),
])
def test_a_worker_is_shown_the_one_device_that_it_is_given(
    with_cuda: pytest.MonkeyPatch, given: str | None, device: str, entry: str
) -> None:
    if given is not None:
        with_cuda.setenv(visible.VISIBLE, given)
    with_cuda.setenv(visible.MPS_PIPES, "/run/mps")
    wanted: tuple[Mapping[str, str], str] = ({visible.VISIBLE: entry}, "cuda:0") if entry else ({}, device)
    assert CudaExecutorFactory().alone(device) == wanted


def test_a_worker_uses_the_multi_process_service_only_if_it_is_named(with_cuda: pytest.MonkeyPatch) -> None:
    with_cuda.delenv(visible.MPS_PIPES, raising=False)
    assert CudaExecutorFactory().alone("cuda:1") == (
        {visible.VISIBLE: "1", visible.MPS_PIPES: visible.NO_PIPES}, "cuda:0")
    assert visible.NO_PIPES not in files_for(has_driver=True).usable
    with_cuda.setenv(visible.MPS_PIPES, "/run/mps")
    assert "/run/mps" in files_for(has_driver=True).usable
    assert "/run/mps" not in files_for(has_driver=False).usable


def test_without_cuda_nothing_is_hidden() -> None:
    assert CudaExecutorFactory().alone("cuda:0") == ({}, "cuda:0")


def test_instances_of_a_device_are_counted_without_starting_cuda(with_cuda: pytest.MonkeyPatch) -> None:
    assert CudaExecutorFactory().devices() == ["cuda:0", "cuda:1"]
    with_cuda.setenv(visible.VISIBLE, INSTANCES + ",MIG-0cc3")
    assert CudaExecutorFactory().devices() == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_where_nothing_else_counts_another_process_asks_the_driver(with_cuda: pytest.MonkeyPatch) -> None:
    def here() -> int:
        raise AssertionError("CUDA is started")

    with_cuda.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    with_cuda.setattr(torch.cuda, "device_count", here)
    with_cuda.setattr(visible, "_COUNTING", f"import os; print(len(os.environ['{visible.VISIBLE}'].split(',')))")
    with_cuda.setenv(visible.VISIBLE, "0,2,3")
    assert CudaExecutorFactory().devices() == ["cuda:0", "cuda:1", "cuda:2"]
    for failing in ("raise OSError", "print('two')", "import time; time.sleep(60)"):
        with_cuda.setattr(visible, "_COUNTING", failing)
        with_cuda.setattr(visible, "_COUNTING_TIMEOUT_S", 1.0)
        assert CudaExecutorFactory().devices() == []


@attrs.define
class Opened:
    """Stands for an executor that was opened on a device."""

    device: torch.device
    settings: CudaSettings


def opened(patch: pytest.MonkeyPatch, **settings: Any) -> Opened:
    patch.setattr(cuda, "CudaExecutor", Opened)
    patch.setattr(overlapping, "OverlappingCudaExecutor", Opened)
    plugins = Plugins.load(names=["djinn-executor-cuda"])
    plugins.configure(settings, {}, "server")
    made: Opened = plugins.find_executor("cuda:0").value.open("cuda:1")
    return made


def test_settings_reach_the_executor(with_cuda: pytest.MonkeyPatch) -> None:
    assert opened(with_cuda).settings == CudaSettings()
    made = opened(with_cuda, cuda_overlap="1", cuda_graphs="static", cuda_memory_fraction="0.5",
                  cuda_staging_bytes=2**24)
    assert made == Opened(torch.device("cuda:1"), CudaSettings(True, "static", 0.5, False, 2**24))


@pytest.mark.parametrize("settings", [
    {"cuda_memory_fraction": 0}, {"cuda_memory_fraction": 1.5}, {"cuda_memory_fraction": "much"},
    {"cuda_staging_bytes": 1000}, {"cuda_overlap": "maybe"}, {"cuda_graphs": "some"}])
def test_settings_that_make_no_sense_are_refused(with_cuda: pytest.MonkeyPatch, settings: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        opened(with_cuda, **settings)


def test_segments_may_grow_unless_the_environment_says_something_else(with_cuda: pytest.MonkeyPatch) -> None:
    for name in (ALLOCATOR, "PYTORCH_ALLOC_CONF"):
        with_cuda.delenv(name, raising=False)
    environ = os.environ
    opened(with_cuda)
    assert ALLOCATOR not in environ
    with_cuda.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    opened(with_cuda, cuda_expandable_segments="1")
    assert ALLOCATOR not in environ
    with_cuda.delenv("PYTORCH_ALLOC_CONF")
    with_cuda.setenv(ALLOCATOR, "")
    with_cuda.delenv(ALLOCATOR)
    opened(with_cuda, cuda_expandable_segments="1")
    assert environ[ALLOCATOR] == "expandable_segments:True"


@pytest.mark.parametrize(("graphs", "is_recorded", "is_cut"), [
    ("off", False, False), ("static", True, False), ("piecewise", True, True)])
def test_graphs_are_recorded_of_what_the_setting_says(
    monkeypatch: pytest.MonkeyPatch, graphs: Literal["off", "static", "piecewise"], is_recorded: bool, is_cut: bool
) -> None:
    monkeypatch.setattr(overlapping, "CudaLane", lambda device: None)
    monkeypatch.setattr(overlapping, "CudaRecorder", lambda device: CpuRecorder())
    monkeypatch.setattr(overlapping.OverlappingCudaExecutor, "put", CpuExecutor.put)
    monkeypatch.setattr(overlapping.OverlappingCudaExecutor, "default_generator", CpuExecutor.default_generator)
    executor = overlapping.OverlappingCudaExecutor(torch.device("cpu"), CudaSettings(True, graphs))
    read = call("aten::equal", Ref(-1), Ref(-2))
    used = session(executor, weights(), *[call("aten::mm", Ref(-1), Ref(-2))] * 9, read, every=9)
    for _ in range(12):
        used.run()
    program, = used.programs
    assert isinstance(program, RecordedProgram) is is_recorded
    assert bool(getattr(program, "segments", [])) is is_cut
    assert executor.relieve() is is_cut
    assert not executor.relieve()


@pytest.mark.parametrize(("fraction", "free", "reserved", "room"), [
    (1.0, 60, 10, (60, 80)), (0.5, 60, 10, (30, 40)), (0.5, 20, 10, (20, 40)), (0.5, 60, 45, (0, 40))])
def test_a_process_has_the_room_of_its_fraction(
    fraction: float, free: int, reserved: int, room: tuple[int, int]
) -> None:
    assert within(fraction, free * GIB, 80 * GIB, reserved * GIB) == (room[0] * GIB, room[1] * GIB)


class Device(CpuExecutor):
    """A device of 80 GiB with an allocator that keeps memory for reuse."""

    def __init__(self, free_bytes: int, kept_bytes: int) -> None:
        super().__init__()
        self.free_bytes, self.kept_bytes = free_bytes, kept_bytes

    def properties(self) -> Mapping[str, Any]:
        return {"kind": "cuda", "name": "a device", "total_bytes": 80 * GIB}

    def memory(self) -> Mapping[str, Any]:
        return {"free_bytes": self.free_bytes, "total_bytes": 80 * GIB, "allocated": MemoryUsage(GIB, GIB, GIB, 0),
                "reserved": MemoryUsage(GIB + self.kept_bytes, GIB + self.kept_bytes, 0, 0)}

    def free_unused(self) -> None:
        self.free_bytes, self.kept_bytes = self.free_bytes + self.kept_bytes, 0


@pytest.mark.parametrize(("free", "kept", "gives"), [
    (GIB, 8 * GIB, True), (4 * GIB, 8 * GIB, True), (5 * GIB, 8 * GIB, False), (GIB, MIN_KEPT_BYTES - 1, False)])
def test_memory_that_is_kept_is_given_back_where_others_have_little(free: int, kept: int, gives: bool) -> None:
    device = Device(free, kept)
    spare = SpareMemory(device)
    assert spare.look() is gives
    assert device.free_bytes == (free + kept if gives else free)
    assert not spare.look()


def test_a_cpu_has_nothing_to_give_back() -> None:
    assert not SpareMemory(CpuExecutor()).look()


def test_the_memory_of_a_device_is_what_its_executor_says() -> None:
    assert device_bytes(Device(GIB, 0)) == 80 * GIB
    assert 0 < device_bytes(CpuExecutor()) < 2**50
