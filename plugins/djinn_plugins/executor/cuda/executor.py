"""The executor ``cuda`` and its factory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from djinn.errors import ConfigurationError
from djinn.settings import Settings
from djinn_plugins.common.failures import is_out_of_memory
from djinn_plugins.common.memory.usage import MemoryUsage
from djinn_plugins.executor.cuda import visible
from djinn_plugins.executor.cuda.settings import CudaSettings
from djinn_plugins.executor.torch.executor import TorchExecutor, no_such_device

__all__ = ("CudaExecutor", "CudaExecutorFactory", "reason_of_loss")

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE = "expandable_segments:True"
_DEFAULTS = CudaSettings()


class CudaExecutor(TorchExecutor):
    """Runs programs on a CUDA device."""

    name = "cuda"

    def __init__(self, device: torch.device, settings: CudaSettings = _DEFAULTS) -> None:
        super().__init__(device)
        self._fraction = settings.cuda_memory_fraction
        if self._fraction < 1:
            torch.cuda.set_per_process_memory_fraction(self._fraction, device)

    def settle(self) -> None:
        """Wait until the device has finished its work; see `djinn_plugins.common.kinds.executor.SupportsSettling`."""
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        """Mark a point in the device's work; see `djinn_plugins.common.kinds.executor.SupportsDeviceMarks`."""
        made = torch.cuda.Event(enable_timing=True)
        made.record(torch.cuda.current_stream(self._device))
        return made

    def loss(self) -> str:
        """Return the reason if the device is lost; see `djinn_plugins.common.kinds.executor.SupportsDeviceLoss`.

        An assertion that fails in a kernel, for example for an index out of range, ends a process's use of CUDA: after
        that, every call of the runtime fails. Querying a stream is the cheapest of these calls.
        """
        return reason_of_loss(lambda: torch.cuda.current_stream(self._device).query())

    def default_generator(self) -> torch.Generator:
        """Return the generator that operators draw from if they are given none."""
        torch.cuda.init()
        return torch.cuda.default_generators[self._device.index or 0]

    def properties(self) -> Mapping[str, Any]:
        """Describe the device; see `djinn_plugins.common.kinds.executor.SupportsDeviceReport`."""
        found = torch.cuda.get_device_properties(self._device)
        free_bytes, total_bytes = self._room()
        # ROCm has another library in the place of cuDNN, with other operators.
        cudnn = 0 if torch.version.hip else torch.backends.cudnn.version() or 0
        return {"kind": "cuda", "name": found.name, "total_bytes": total_bytes, "major": found.major,
                "minor": found.minor, "multi_processor_count": found.multi_processor_count,
                "has_bfloat16": torch.cuda.is_bf16_supported(), "free_bytes": free_bytes, "cudnn": cudnn,
                "attention": attention_kernels(), "uuid": str(getattr(found, "uuid", ""))}

    def memory(self) -> Mapping[str, Any]:
        """Return the driver's and the allocator's figures."""
        free_bytes, total_bytes = self._room()
        stats = torch.cuda.memory_stats(self._device)
        return {"free_bytes": free_bytes, "total_bytes": total_bytes, **{
            name: MemoryUsage(*(stats.get(f"{name}_bytes.all.{figure}", 0)
                                for figure in ("current", "peak", "allocated", "freed")))
            for name in ("allocated", "reserved")}}

    def _room(self) -> tuple[int, int]:
        """Return the device's free memory and all of it, as far as this process may use it."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return within(self._fraction, free_bytes, total_bytes, torch.cuda.memory_reserved(self._device))

    def reset_peak(self) -> None:
        """Reset the allocator's peaks."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def reset_accumulated(self) -> None:
        """Reset the allocator's sums."""
        torch.cuda.reset_accumulated_memory_stats(self._device)

    def free_unused(self) -> None:
        """Give cached memory back to the driver."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def within(fraction: float, free_bytes: int, total_bytes: int, reserved_bytes: int) -> tuple[int, int]:
    """Return a device's free memory and all of it for a process that may use a fraction and has reserved some."""
    allowed_bytes = int(total_bytes * fraction)
    return min(free_bytes, max(allowed_bytes - reserved_bytes, 0)), allowed_bytes


def reason_of_loss(call: Callable[[], object]) -> str:
    """Return why a device is lost, if a call of its runtime fails although nothing is wrong with the call itself."""
    try:
        call()
    except RuntimeError as error:
        # A lack of memory passes.
        return "" if is_out_of_memory(error) else str(error).partition("\n")[0]
    return ""


def attention_kernels() -> tuple[str, ...]:
    """Return the kernels of attention that PyTorch is built with and may use, in the order in which it tries them."""
    names = {1: "flash", 2: "efficient", 0: "math", 3: "cudnn"}
    built = {"flash": torch.backends.cuda.is_flash_attention_available(), "efficient": True, "math": True,
             "cudnn": torch.backends.cudnn.is_available()}
    order = [names[int(kernel)] for kernel in torch._C._get_sdp_priority_order() if int(kernel) in names]
    return tuple(name for name in order if built[name])


class CudaExecutorFactory:
    """Opens CUDA devices."""

    name = "cuda"

    def __init__(self) -> None:
        self._settings = _DEFAULTS

    def use_settings(self, settings: Settings) -> None:
        """Use the settings of a session or a server."""
        self._settings = settings(CudaSettings)

    def devices(self) -> list[str]:
        """List the CUDA devices. This counts them without using one: it creates no CUDA context."""
        return _names(visible.count(os.environ))

    def alone(self, device: str) -> tuple[Mapping[str, str], str]:
        """Let a new process see one device only; see `djinn_plugins.common.kinds.executor.SupportsOwnDevice`."""
        entry = visible.entry_of(device, os.environ)
        return ({visible.VISIBLE: entry, **visible.without_mps(os.environ)}, "cuda:0") if entry else ({}, device)

    def open(self, device: str) -> CudaExecutor:
        """Open a device.

        Raises:
            ConfigurationError: PyTorch finds no CUDA device here, or not this one.
        """
        # A worker's sandbox lets it start no other process; and this one starts CUDA now.
        known = _names(visible.count_here(os.environ))
        if not known:
            raise ConfigurationError(
                f"The executor cuda finds no device{f' {device!r}' if device else ''}: {_reason()}.",
                hint="To compute on the CPU, use the device cpu, and choose no executor or the executor cpu.")
        wanted = "cuda:0" if device in ("", "cuda") else device
        if wanted not in known:
            raise no_such_device(self.name, device, known)
        if self._settings.cuda_expandable_segments and not {ALLOCATOR, "PYTORCH_ALLOC_CONF"} & os.environ.keys():
            # The allocator reads it when it is used for the first time in this process.
            os.environ[ALLOCATOR] = _EXPANDABLE
        if self._settings.cuda_overlap:
            from djinn_plugins.executor.cuda.overlapping import OverlappingCudaExecutor

            return OverlappingCudaExecutor(torch.device(wanted), self._settings)
        return CudaExecutor(torch.device(wanted), self._settings)


def _names(count: int) -> list[str]:
    return [f"cuda:{index}" for index in range(count)]


def _reason() -> str:
    """Say why there is no CUDA device."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch, {torch.__version__}, is built without CUDA"
    if visible.VISIBLE in os.environ:
        return f"{visible.VISIBLE}={os.environ[visible.VISIBLE]} hides them or the driver shows none"
    return "the driver shows none (see nvidia-smi)"
