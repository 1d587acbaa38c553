"""``torch.remote_accelerator`` has what ``torch.cuda`` has, except for what cannot be true of a remote device."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE

import djinn
from djinn.errors import TransportError
from djinn_plugins.device.accelerator.availability import make_available
from djinn_plugins.executor import device_answers

LEFT_OUT = {
    "CUDA's own libraries, handles and binaries": """
        CUDAGraph CUDAPluggableAllocator CudaError ExternalStream GreenContext MemPool cudaStatus cudart check_error
        caching_allocator_alloc caching_allocator_delete caching_allocator_disabled caching_allocator_enable
        change_current_allocator current_blas_handle current_solver_handle gds get_allocator_backend get_arch_list
        get_gencode_flags get_stream_from_external graph graph_pool_handle graphs green_contexts has_half has_magma
        jiterator make_graphed_callables nccl nvtx profiler sparse tunable use_mem_pool PYTORCH_RELEASES_CODE_CC
        DEVICE_REQUIREMENT""",
    "Sensors of a card, which the server does not read": """
        clock_rate list_gpu_processes memory_usage power_draw temperature utilization""",
    "Pinned memory of the host has no allocator of its own": """
        host_memory_stats host_memory_stats_as_nested_dict reset_accumulated_host_memory_stats
        reset_peak_host_memory_stats""",
    "The server's allocator is not this session's to limit or to inspect": """
        get_per_process_memory_fraction set_per_process_memory_fraction memory_snapshot""",
    "Waits are counted by djinn.stats()": "get_sync_debug_mode set_sync_debug_mode",
    "Deprecated": """
        max_memory_cached memory_cached reset_max_memory_allocated reset_max_memory_cached BFloat16Storage
        BFloat16Tensor BoolStorage BoolTensor ByteStorage ByteTensor CharStorage CharTensor ComplexDoubleStorage
        ComplexFloatStorage DoubleStorage DoubleTensor FloatStorage FloatTensor HalfStorage HalfTensor IntStorage
        IntTensor LongStorage LongTensor ShortStorage ShortTensor""",
    "Parts of the module's implementation": """
        AcceleratorError Any Callable DeferredCudaCallError Device NewType Optional TYPE_CHECKING cast classproperty
        default_generators importlib lru_cache memory os platform random streams threading torch traceback warnings""",
}


@pytest.fixture(autouse=True)
def _available() -> Iterator[None]:
    with make_available():
        yield


def test_every_name_of_torch_cuda_is_there_or_left_out_for_a_reason() -> None:
    names = {name for name in dir(torch.cuda) if not name.startswith("_")}
    left_out = {name for group in LEFT_OUT.values() for name in group.split()}
    ours = {name for name in names if hasattr(torch.remote_accelerator, name)}
    assert names - ours - left_out == set()
    assert ours & left_out == set(), "listed as left out, but there"


def test_the_server_tells_its_device() -> None:
    module = torch.remote_accelerator
    properties = module.get_device_properties()
    assert properties.name == module.get_device_name(DEVICE)
    assert properties.kind == "cpu"
    free_bytes, total_bytes = module.mem_get_info()
    assert 0 < free_bytes <= total_bytes == properties.total_memory
    assert torch.accelerator.get_memory_info()[1] == total_bytes
    assert module.is_bf16_supported()
    with pytest.raises(RuntimeError, match="no compute capability"):
        module.get_device_capability()


def test_memory_of_the_session_is_counted_on_the_server() -> None:
    accelerator = torch.accelerator
    before = accelerator.memory_allocated()
    held = torch.ones(1000, 1000, device=DEVICE)
    assert accelerator.memory_allocated() - before == held.nbytes
    more = held + 1
    assert accelerator.max_memory_allocated() - before == 2 * held.nbytes
    del more
    assert accelerator.memory_allocated() - before == held.nbytes
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() - before == held.nbytes
    accelerator.reset_accumulated_memory_stats()
    other = held * 2
    stats = accelerator.memory_stats()
    assert stats["allocated_bytes.all.allocated"] == other.nbytes
    assert stats["allocated_bytes.all.freed"] == 0
    assert (stats["num_ooms"], stats["segment.large_pool.peak"], stats["oversize_segments.current"]) == (0, 0, 0)
    nested = torch.remote_accelerator.memory_stats_as_nested_dict()
    assert nested["active_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"]
    accelerator.empty_cache()
    assert "allocated" in torch.remote_accelerator.memory_summary()


def test_without_a_session_nothing_is_allocated_and_nothing_starts() -> None:
    djinn.shutdown()
    assert torch.accelerator.memory_allocated() == 0
    assert torch.accelerator.memory_stats() == {}
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.remote_accelerator.reset_peak_memory_stats()
    assert not djinn.is_initialized()


def test_a_device_that_is_described_wrongly_is_an_error(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(self: Any, handle: int) -> Any:
        return ["cpu", "x" * 300, -1]

    monkeypatch.setattr(device_answers.DeviceReports, "answer", lies)
    for ask in (torch.accelerator.get_memory_info, torch.remote_accelerator.get_device_name):
        with pytest.raises(TransportError, match="described its device wrongly"):
            ask()


def test_only_devices_that_exist_can_be_current() -> None:
    accelerator = torch.accelerator
    accelerator.set_device_index(0)
    accelerator.set_device_index(-1)
    with accelerator.device_index(0):
        assert accelerator.current_device_index() == 0
    for wrong in (2, "remote_accelerator:2"):
        with pytest.raises(RuntimeError, match="does not exist"):
            accelerator.set_device_index(wrong)
    with pytest.raises(RuntimeError, match="does not exist"):
        accelerator.synchronize(2)


def test_streams_and_events_are_those_of_the_device() -> None:
    stream, event = torch.Stream(), torch.Event()
    assert (stream.device, event.device) == (DEVICE, DEVICE)
    assert isinstance(stream, torch.Stream)
    assert isinstance(event, torch.Event)
    usual = torch.accelerator.current_stream()
    assert stream != usual
    with stream:
        assert torch.accelerator.current_stream() == stream
        x = torch.ones(3, device=DEVICE)
        stream.record_event(event)
    assert torch.accelerator.current_stream() == usual
    usual.wait_event(event)
    usual.wait_stream(stream)
    y = x + 1
    event.synchronize()
    assert y.tolist() == [2.0, 2.0, 2.0]
    torch.accelerator.set_stream(stream)
    assert torch.remote_accelerator.current_stream() == stream
    torch.accelerator.set_stream(usual)
    with torch.remote_accelerator.stream(stream), torch.remote_accelerator.stream(None):
        assert torch.accelerator.current_stream() == stream


def test_events_take_the_time_of_what_is_between_them() -> None:
    begin, end = (torch.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="recorded"):
        begin.elapsed_time(end)
    x = torch.ones(700, 700, device=DEVICE)
    begin.record()
    for _ in range(8):
        x = x @ x / 700
    end.record()
    assert 1 < begin.elapsed_time(end) < 60_000
    with pytest.raises(ValueError, match="enable_timing"):
        torch.Event().elapsed_time(end)
    assert torch.remote_accelerator.Event(True).query()
    with pytest.raises(RuntimeError, match="shared with other processes"):
        torch.Event(interprocess=True)


def test_a_wait_for_an_event_raises_what_failed_before_it() -> None:
    failing = torch.linalg.inv(torch.zeros(2, 2, device=DEVICE))
    event = torch.Event()
    event.record()
    with pytest.raises(torch.linalg.LinAlgError):
        event.synchronize()
    del failing


def test_classes_with_a_device_stay_what_they_are_elsewhere() -> None:
    class Own(torch.Stream):
        pass

    on_cpu = torch.Stream(device="cpu")
    assert (type(on_cpu), on_cpu.device.type) == (torch._C.Stream, "cpu")
    assert isinstance(Own(device="cpu"), Own)
    assert not isinstance(on_cpu, Own)
    assert issubclass(torch._C.Stream, torch.Stream)
    assert not isinstance(3, torch.Event)


def test_seeds_autocast_and_sharing() -> None:
    module = torch.remote_accelerator
    torch.manual_seed(5)
    assert module.initial_seed() == 5
    module.seed()
    assert module.initial_seed() != 5
    module.init()
    assert module.is_initialized()
    assert isinstance(module.amp, ModuleType)
    with module.amp.autocast(dtype=torch.bfloat16):
        assert (torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="shared with other processes"):
        module.ipc_collect()
    assert not module.can_device_access_peer(0, 0)
