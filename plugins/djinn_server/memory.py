"""Giving memory back to the system after a session."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

__all__ = ("return_memory",)


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
