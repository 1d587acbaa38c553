"""The processor of this machine, as far as PyTorch's kernels depend on it."""

from __future__ import annotations

import platform

import torch

__all__ = ("processor_name",)


def processor_name() -> str:
    """Return the instruction set, and the part of it that PyTorch's kernels use."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
