"""The executor ``cpu`` and its factory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from djinn_plugins.common.calls.processor import processor_name
from djinn_plugins.executor.torch.executor import TorchExecutor, no_such_device

__all__ = ("CpuExecutor", "CpuExecutorFactory")


class CpuExecutor(TorchExecutor):
    """Runs programs on the CPU."""

    name = "cpu"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself; see `djinn_plugins.common.kinds.executor.SupportsSharing`."""
        return tensor

    def properties(self) -> Mapping[str, Any]:
        """Describe the processor; see `djinn_plugins.common.kinds.executor.SupportsDeviceReport`."""
        return {"kind": "cpu", "name": processor_name(), "has_bfloat16": True,
                "free_bytes": _pages_bytes("SC_AVPHYS_PAGES"), "total_bytes": _pages_bytes("SC_PHYS_PAGES"),
                "multi_processor_count": os.cpu_count() or 0}

    def memory(self) -> Mapping[str, Any]:
        """Measure the machine's memory; what sessions allocate is counted with their values."""
        return {"free_bytes": _pages_bytes("SC_AVPHYS_PAGES"), "total_bytes": _pages_bytes("SC_PHYS_PAGES")}

    def reset_peak(self) -> None:
        """Do nothing: the session resets its own count."""

    def reset_accumulated(self) -> None:
        """Do nothing, as above."""

    def free_unused(self) -> None:
        """Do nothing: PyTorch keeps no memory of the CPU for reuse."""


def _pages_bytes(name: str) -> int:
    """Return the size of this kind of pages; 0 if the system does not tell."""
    if name not in getattr(os, "sysconf_names", {}):
        return 0
    return max(os.sysconf(name), 0) * os.sysconf("SC_PAGE_SIZE")


class CpuExecutorFactory:
    """Opens the CPU."""

    name = "cpu"

    def devices(self) -> list[str]:
        """List the one device."""
        return ["cpu"]

    def open(self, device: str) -> CpuExecutor:
        """Open the CPU.

        Raises:
            ConfigurationError: It is another device.
        """
        if device not in ("", "cpu"):
            raise no_such_device(self.name, device, self.devices())
        return CpuExecutor()
