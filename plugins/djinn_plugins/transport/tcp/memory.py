"""Memory for tensors that are about to be received."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable
from functools import cache
from time import monotonic

import attrs
import torch

from djinn.wire.messages import TensorHeader
from djinn_plugins.common.memory.tensor_bytes import empty_from, size_bytes, tensor_in

__all__ = ("KEPT_S", "LARGE_BYTES", "MAX_KEPT_BYTES", "Reserve")

LARGE_BYTES = 2**22
"""From this size on, the C library often requests new pages from the system; touching them takes as long as copying."""
MAX_KEPT_BYTES = 2**29
"""Maximum memory that is tracked for reuse, in use or not."""
KEPT_S = 5.0
"""How long memory is kept after the last large tensor was received."""


@attrs.frozen
class _Kept:
    """A block of memory that was handed out."""

    storage: torch.UntypedStorage
    address: int
    length: int

    def references(self) -> tuple[int, int]:
        """Return the number of references in C++, held by tensors, and in Python, held by storage objects."""
        return torch._C._storage_Use_Count(self.storage._cdata), sys.getrefcount(self.storage)

    @property
    def is_free(self) -> bool:
        """Whether the storage is unreferenced, and its memory has not been replaced meanwhile."""
        return (self.references() == _references_of_none() and self.storage.data_ptr() == self.address
                and self.storage.nbytes() == self.length)


@cache
def _references_of_none() -> tuple[int, int]:
    return _Kept(torch.empty(1, dtype=torch.uint8).untyped_storage(), 0, 1).references()


class Reserve:
    """Allocates memory, and reuses large blocks when their tensors are gone: new pages would halve the throughput.

    Concurrency:
        Called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._used_at = 0.0
        self._timer: threading.Timer | None = None
        self._closed = False

    def empty(self, header: TensorHeader) -> torch.Tensor:
        """Allocate the CPU tensor that a checked header describes. Its memory is touched only when it is filled."""
        length = size_bytes(header)
        if length < LARGE_BYTES:
            return empty_from(header)
        with torch.inference_mode(False), torch.no_grad():
            return tensor_in(self._take(length).storage, header)

    def close(self) -> None:
        """Stop tracking memory."""
        with self._lock:
            self._closed = True
            self._kept.clear()
            if self._timer is not None:
                self._timer.cancel()

    def _take(self, length: int) -> _Kept:
        with self._lock:
            index = next((index for index, kept in enumerate(self._kept) if kept.length == length and kept.is_free), -1)
            taken = _made(length) if index < 0 else self._kept.pop(index)
            if not self._closed:
                self._kept.append(taken)
                while sum(kept.length for kept in self._kept) > MAX_KEPT_BYTES:
                    del self._kept[0]
                self._used_at = monotonic()
                self._watch()
        return taken

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(KEPT_S, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            self._timer = None
            if monotonic() - self._used_at >= KEPT_S:
                self._kept.clear()
            elif not self._closed:
                self._watch()


def _made(length: int) -> _Kept:
    storage = torch.empty(length, dtype=torch.uint8).untyped_storage()
    address = storage.data_ptr()
    advise = _advise()
    if advise is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        # This is advice: the system decides whether to use large pages.
        advise(start, address + length - start, mmap.MADV_HUGEPAGE)
    return _Kept(storage, address, length)


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise.restype = ctypes.c_int
    return advise
