"""Giving memory back to the system after a session."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ("default_keep_bytes", "device_bytes", "return_memory")

MAX_DEFAULT_KEEP_BYTES = 4 * 2**30
_CONTROL_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux says how much memory a container has, in two versions."""


def default_keep_bytes() -> int:
    """Return the room for kept uploads where nobody says how much: an eighth of the memory, and 4 GiB at most."""
    memory_bytes = _physical_bytes()
    return min(MAX_DEFAULT_KEEP_BYTES, memory_bytes // 8) if memory_bytes else MAX_DEFAULT_KEEP_BYTES


def device_bytes(device: str) -> int:
    """Return how much memory a device has, or what this process may have of it; 0 if the system does not tell."""
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(filter(None, (_physical_bytes(), *map(_limit_in, _CONTROL_GROUPS))), default=0)


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    except (AttributeError, ValueError, OSError):
        # Not every system tells.
        return 0


def _limit_in(file: str) -> int:
    """Read the limit of a control group; 0 if there is none."""
    try:
        text = Path(file).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def return_memory() -> None:
    """Give freed memory back to the system where the C library keeps it, and to the device where PyTorch does.

    Without this, a server that once held large values in many small blocks appears to hold them for ever, and a worker
    keeps memory of a device from the others.
    """
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        # Not every C library on Linux is glibc; the others have no such call.
        return None
    trim.argtypes = [ctypes.c_size_t]
    trim.restype = ctypes.c_int
    return trim
