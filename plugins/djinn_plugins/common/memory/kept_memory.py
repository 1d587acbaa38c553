"""Memory of uploads that are kept: sessions read it together, and what one of them writes becomes its own.

The bytes lie in a file in memory that no program can write to. A value is a private mapping of a part of it: the system
copies a page when an operator writes to it for the first time, whichever operator that is, so sharing does not rely on
what operators declare. The memory of a part is freed when neither the store nor a value uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Self

import torch

from djinn.wire.messages import TensorHeader
from djinn_plugins.common.memory.tensor_bytes import bytes_of, size_bytes, storage_address_of, tensor_in

__all__ = ("KeptBytes", "KeptMemory", "copy_to", "is_mapped", "map_private")

FILE_BYTES = 2**50
"""Size of the file. It is sparse, and no part of it is used twice."""
_mapped: dict[int, int] = {}
"""Lengths of the mappings that exist, by address."""
_log = logging.getLogger("djinn.server")


class KeptMemory:
    """The file in memory. A process opens it before a sandbox forbids that files grow.

    Raises:
        OSError: The system has no such files.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory")
        self.descriptor = os.memfd_create("djinn-uploads", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        os.ftruncate(self.descriptor, FILE_BYTES)
        self._lock = threading.Lock()
        self._end = 0

    @classmethod
    def opened(cls) -> Self | None:
        """Open it; ``None`` if the system has no such files, so that each value is a copy."""
        try:
            return cls()
        except OSError as error:
            _log.info("uploads are not shared: %s", error)
            return None

    def store(self, tensor: torch.Tensor) -> KeptBytes:
        """Copy the bytes of a dense CPU tensor.

        Raises:
            OSError: There is no memory.
        """
        data = bytes_of(tensor)
        length = -(-max(1, len(data)) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with self._lock:
            begin = self._end
            if begin + length > FILE_BYTES:
                raise OSError("the file of kept uploads is full")
            self._end += length
        made = KeptBytes(self.descriptor, begin, partial(_free, self, begin, length))
        copy_to(self.descriptor, begin, length, data)
        return made


class KeptBytes:
    """The bytes of one upload.

    Args:
        descriptor: The file in which they lie.
        begin: Where they begin.
        free: Called once nothing uses them, by any thread.
    """

    def __init__(self, descriptor: int, begin: int, free: Callable[[], None]) -> None:
        self.descriptor = descriptor
        self._begin = begin
        weakref.finalize(self, free).atexit = False

    def mapped(self, header: TensorHeader) -> torch.Tensor | None:
        """Return a new tensor on these bytes. Writes to it change nothing else.

        Returns:
            The tensor; ``None`` if the process may not have more mappings.
        """
        try:
            # The mapping refers to this object, so the bytes stay as long as a tensor uses them.
            data = map_private(self.descriptor, self._begin, size_bytes(header), self)
        except OSError as error:
            _log.debug("an upload is not shared: %s", error)
            return None
        return tensor_in(torch.frombuffer(data, dtype=torch.uint8).untyped_storage(), header)


def copy_to(descriptor: int, begin: int, length: int, data: torch.Tensor) -> None:
    """Copy bytes, ``u8[N]``, to the beginning of a part of a file in memory.

    Raises:
        OSError: There is no memory.
    """
    with mmap.mmap(descriptor, length, offset=begin) as window, torch.no_grad():
        torch.frombuffer(window, dtype=torch.uint8, count=length)[:len(data)].copy_(data)


def _free(memory: KeptMemory, begin: int, length: int) -> None:
    with contextlib.suppress(OSError, ValueError), mmap.mmap(memory.descriptor, length, offset=begin) as window:
        window.madvise(mmap.MADV_REMOVE)


@cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    found.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return found


def map_private(descriptor: int, begin: int, length: int, *needed: object) -> ctypes.Array[ctypes.c_char]:
    """Map a part of a file; pages that are written to become this process's own.

    Unlike Python's own mappings, these hold no descriptor, of which a process has few.

    Args:
        descriptor: The file.
        begin: Where the part begins, a multiple of the size of a page.
        length: Its length in bytes.
        needed: Objects that stay as long as the mapping.

    Raises:
        OSError: The system refuses.
    """
    address = _libc().mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, begin)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _mapped[address] = length
    data = (ctypes.c_char * length).from_address(address)
    weakref.finalize(data, _unmap, address, length, needed).atexit = False
    return data


def is_mapped(value: torch.Tensor) -> bool:
    """Whether a value lies in a part of a file that was mapped, so that it needs memory only where it was written."""
    if not _mapped or value.device.type != "cpu":
        return False
    address = storage_address_of(value)
    begin = address - address % mmap.ALLOCATIONGRANULARITY
    return begin in _mapped and address + value.untyped_storage().nbytes() <= begin + _mapped[begin]


def _unmap(address: int, length: int, _: tuple[object, ...]) -> None:
    _mapped.pop(address, None)
    _libc().munmap(address, length)
