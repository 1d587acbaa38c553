"""The executor ``cuda`` and its factory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from djinn_lib_service.memory_usage import MemoryUsage
from djinn_lib_torch.executor import TorchExecutor, no_such_device

from djinn.errors import ConfigurationError

__all__ = ("OVERLAP", "CudaExecutor", "CudaExecutorFactory")

OVERLAP = "DJINN_CUDA_OVERLAP"
"""Environment variable: ``1`` enables copies that overlap with computing, and graphs."""


class CudaExecutor(TorchExecutor):
    """Runs programs on a CUDA device."""

    name = "cuda"

    def settle(self) -> None:
        """Wait until the device has finished its work; see `djinn_lib_service.kinds.executor.SupportsSettling`."""
        torch.cuda.synchronize(self._device)

    def loss(self) -> str:
        """Return the reason if the device is lost; see `djinn_lib_service.kinds.executor.SupportsDeviceLoss`.

        An assertion that fails in a kernel, for example for an index out of range, ends a process's use of CUDA: after
        that, every call of the runtime fails. Querying a stream is the cheapest of these calls.
        """
        try:
            torch.cuda.current_stream(self._device).query()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def default_generator(self) -> torch.Generator:
        """Return the generator that operators draw from if they are given none."""
        torch.cuda.init()
        return torch.cuda.default_generators[self._device.index or 0]

    def properties(self) -> Mapping[str, Any]:
        """Describe the device; see `djinn_lib_service.kinds.executor.SupportsDeviceReport`."""
        found = torch.cuda.get_device_properties(self._device)
        return {"kind": "cuda", "name": found.name, "total_bytes": found.total_memory, "major": found.major,
                "minor": found.minor, "multi_processor_count": found.multi_processor_count,
                "has_bfloat16": torch.cuda.is_bf16_supported(),
                "free_bytes": torch.cuda.mem_get_info(self._device)[0],
                "cudnn": torch.backends.cudnn.version() or 0, "attention": attention_kernels()}

    def memory(self) -> Mapping[str, Any]:
        """Return the driver's and the allocator's figures."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        return {"free_bytes": free_bytes, "total_bytes": total_bytes, **{
            name: MemoryUsage(*(stats.get(f"{name}_bytes.all.{figure}", 0)
                                for figure in ("current", "peak", "allocated", "freed")))
            for name in ("allocated", "reserved")}}

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

    def devices(self) -> list[str]:
        """List the CUDA devices. This counts them without using one: it creates no CUDA context."""
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]

    def open(self, device: str) -> CudaExecutor:
        """Open a device.

        Raises:
            ConfigurationError: PyTorch finds no CUDA device here, or not this one.
        """
        known = self.devices()
        if not known:
            raise ConfigurationError(
                f"The executor cuda finds no device{f' {device!r}' if device else ''}: {_reason()}.",
                hint="To compute on the CPU, use the device cpu, and choose no executor or the executor cpu.")
        wanted = "cuda:0" if device in ("", "cuda") else device
        if wanted not in known:
            raise no_such_device(self.name, device, known)
        if os.environ.get(OVERLAP) == "1":
            from djinn_executor_cuda.overlapping import OverlappingCudaExecutor

            return OverlappingCudaExecutor(torch.device(wanted))
        return CudaExecutor(torch.device(wanted))


def _reason() -> str:
    """Say why there is no CUDA device."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch, {torch.__version__}, is built without CUDA"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides them or the driver shows none"
    return "the driver shows none (see nvidia-smi)"
