"""Whether the remote device says that it is available.

PyTorch and libraries ask this to choose a device, and PyTorch also to pin the memory of ordinary tensors. Importing
djinn must not change what a program does; so the answer is no until a run mode makes the device the accelerator of the
process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ("available", "is_available")

_uses = 0


def is_available() -> bool:
    """Whether the device is this process's accelerator."""
    return _uses > 0


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Make the device this process's accelerator within the context."""
    global _uses
    _uses += 1
    try:
        yield
    finally:
        _uses -= 1
