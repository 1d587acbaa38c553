"""``torch.accelerator``: refers to the remote device while that is available, and otherwise to what it did before.

The functions of ``torch.accelerator`` call functions of ``torch._C``, which ask PyTorch's device guard and allocator. A
device that is registered from Python cannot implement these. So the functions of ``torch._C`` are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from djinn.record import devices
from djinn.wire.tensors import DTYPES
from djinn_plugins.common.operators.generators import RemoteGenerator
from djinn_plugins.device.accelerator import availability
from djinn_plugins.device.interceptor.streams import RemoteEvent, RemoteStream
from djinn_plugins.device.interceptor.type_substitutes import substitute

__all__ = ("install",)


def install(before: torch.device | None, module: Any) -> None:
    """Replace the functions, and the classes of streams and events.

    Args:
        before: The accelerator that PyTorch was built for, before the device was registered.
        module: The device's module.
    """
    def accelerator() -> torch.device | None:
        return torch.device(devices.logical_device().type) if availability.is_available() else before

    remote, usual = _remote(module), {} if before is None or before.type != "cuda" else _cuda()
    torch._C._accelerator_getAccelerator = accelerator  # type: ignore[assignment]  # may be None, as the original's
    for name, function in remote.items():
        setattr(torch._C, f"_accelerator_{name}", _routed(function, usual.get(name, _refuse)))
    substitute("Stream", RemoteStream, lambda: before or torch.device("cpu"))
    substitute("Event", RemoteEvent, lambda: before or torch.device("cpu"))
    substitute("Generator", RemoteGenerator, lambda: torch.device("cpu"))


def _routed(remote: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    def routed(*args: Any) -> Any:
        return (remote if availability.is_available() else usual)(*args)

    return routed


def _refuse(*args: Any) -> NoReturn:
    raise RuntimeError("Cannot access accelerator device when none is available.")


def _remote(module: Any) -> Mapping[str, Callable[..., Any]]:
    """Return what each function does for the remote device."""
    def exchange(index: int) -> int:
        module.set_device(index)
        return int(module.current_device())

    def set_stream(stream: Any) -> None:
        if not isinstance(stream, RemoteStream):
            raise RuntimeError(f"{stream} is no stream of {devices.logical_device().type}.")  # noqa: TRY004  # as eager
        module.set_stream(stream)

    return {
        "getDeviceIndex": module.current_device, "setDeviceIndex": module.set_device, "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange, "getStream": module.current_stream, "setStream": set_stream,
        "synchronizeDevice": module.synchronize, "isAllocatorInitialized": module.is_initialized,
        "emptyCache": module.empty_cache, "emptyHostCache": lambda: None,
        "getDeviceStats": module.memory_stats_as_nested_dict,
        "resetAccumulatedStats": module.reset_accumulated_memory_stats,
        "resetPeakStats": module.reset_peak_memory_stats, "getMemoryInfo": module.mem_get_info,
        "getDeviceCapability": lambda index: {"supported_dtypes": module.supported_dtypes()},
    }


def _cuda() -> Mapping[str, Callable[..., Any]]:
    """Return what each function does for CUDA, if that is the accelerator without the remote device."""
    cuda = torch.cuda
    return {
        "getDeviceIndex": cuda.current_device, "setDeviceIndex": cuda.set_device, "exchangeDevice": _exchange_cuda,
        "maybeExchangeDevice": cuda.set_device, "getStream": cuda.current_stream, "setStream": cuda.set_stream,
        "synchronizeDevice": cuda.synchronize, "isAllocatorInitialized": cuda.is_initialized,
        "emptyCache": cuda.empty_cache, "emptyHostCache": torch._C._host_emptyCache,
        "getDeviceStats": cuda.memory_stats_as_nested_dict,
        "resetAccumulatedStats": cuda.reset_accumulated_memory_stats,
        "resetPeakStats": cuda.reset_peak_memory_stats, "getMemoryInfo": cuda.mem_get_info,
        "getDeviceCapability": lambda index: {"supported_dtypes": set(DTYPES.values())},
    }


def _exchange_cuda(index: int) -> int:
    before = torch.cuda.current_device()
    torch.cuda.set_device(index)
    return before
