"""The executor ``cpu`` and its factory."""

from __future__ import annotations

import torch
from djinn_lib_torch.executor import TorchExecutor, no_such_device

__all__ = ("CpuExecutor", "CpuExecutorFactory")


class CpuExecutor(TorchExecutor):
    """Runs programs on the CPU."""

    name = "cpu"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself; see `djinn_lib_service.kinds.executor.SupportsSharing`."""
        return tensor


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
