"""Whether the remote device says that it is available.

PyTorch and libraries ask that to choose a device, and PyTorch also to pin memory of ordinary tensors. Importing djinn
must not change what a program does; so the answer is no until somebody wants the device to be the process's
accelerator, as ``djinn run`` does.
"""

from __future__ import annotations

__all__ = ("is_available", "make_available")

_available = False


def is_available() -> bool:
    """Whether the device is this process's accelerator."""
    return _available


def make_available() -> None:
    """Make the device this process's accelerator, for good."""
    global _available
    _available = True
