"""Giving memory back to the system after a session."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

__all__ = ("default_keep_bytes", "return_memory")

MAX_DEFAULT_KEEP_BYTES = 4 * 2**30


def default_keep_bytes() -> int:
    """Return the room for kept uploads where nobody says how much: an eighth of the memory, and 4 GiB at most."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    except (AttributeError, ValueError, OSError):
        # Not every system tells.
        return MAX_DEFAULT_KEEP_BYTES
    return min(MAX_DEFAULT_KEEP_BYTES, memory_bytes // 8)


def return_memory() -> None:
    """Give freed memory back to the system where the C library keeps it for itself; elsewhere do nothing.

    Without this, a server that once held large values in many small blocks appears to hold them for ever.
    """
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
