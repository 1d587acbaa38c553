"""The preloaded allocator of guarded_memory.c, and what it has written down of a fault."""

from __future__ import annotations

import ctypes
import mmap
import signal
import struct
from collections.abc import Mapping
from typing import Any

BEYOND_STORAGE, NOT_STRIDED, SHARES = -3, -4, -5
NOTED = {BEYOND_STORAGE: "leaves a tensor that reaches beyond its storage", NOT_STRIDED: "leaves a tensor that is not "
         "strided", SHARES: "leaves a tensor that shares memory with an operand, against its schema"}
_NAME, _FRAMES, _HEAD = 160, 48, 9


class GuardedMemory:
    """What this process was started with; see guarded_memory.c."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.guarded_memory_limit.argtypes = [ctypes.c_double]
        size_bytes = self._library.guarded_memory_fault_bytes()
        self.shared = mmap.mmap(-1, size_bytes)
        self._buffer = (ctypes.c_char * size_bytes).from_buffer(self.shared)
        self._size_bytes = size_bytes

    def open(self) -> None:
        """Write faults of this process down from now on."""
        failed = self._library.guarded_memory_open(ctypes.byref(self._buffer), self._size_bytes)
        if failed:
            raise RuntimeError(f"memory cannot be guarded here: {failed}")
        self.arm = self._library.guarded_memory_arm
        self.limit = self._library.guarded_memory_limit
        self._library.guarded_memory_note.argtypes = [ctypes.c_int, ctypes.c_size_t]
        self.note = self._library.guarded_memory_note
        self.begin = self._library.guarded_memory_begin
        self.broken = self._library.guarded_memory_broken

    def clear(self) -> None:
        """Forget the last fault."""
        struct.pack_into("q", self.shared, 0, 0)

    def fault(self) -> dict[str, Any]:
        """Read the last fault."""
        words = struct.unpack_from(f"{_HEAD}q", self.shared, 0)
        names = [self.shared[at:at + _NAME].split(b"\0")[0].decode(errors="replace")
                 for at in range(_HEAD * 8, _HEAD * 8 + words[8] * _NAME, _NAME)]
        return {"signal": words[0], "code": words[1], "address": words[2], "is_write": bool(words[3]),
                "block_size": words[4], "before": words[5], "beyond": words[6], "was_freed": bool(words[7]),
                "frames": names}


def described(fault: Mapping[str, Any]) -> str:
    """Say in words what a fault is."""
    number, code, address = fault["signal"], fault["code"], fault["address"]
    if not number:
        return "ended without a signal"
    name = signal.Signals(number).name
    if code in NOTED:
        return NOTED[code]
    if code == -2:
        return "write beside a block"
    if name == "SIGSEGV":
        verb = "write" if fault["is_write"] else "read"
        if fault["block_size"] >= 0:
            where = (f"{fault['beyond']} bytes beyond" if fault["beyond"] else
                     f"{fault['before']} bytes before" if fault["before"] else "inside")
            return f"{verb} {where} a block of {fault['block_size']}{', freed' if fault['was_freed'] else ''}"
        if code == 128:
            return "access that is not aligned, or to no address"
        return f"{verb} at no block" if address > 65536 else f"{verb} through a null pointer"
    return name


def kernel_of(fault: Mapping[str, Any]) -> str:
    """Name the function of PyTorch that a fault is nearest to."""
    named = [frame for frame in fault["frames"] if "guarded" not in frame and not frame.startswith(
        ("_ZN2at4_ops", "libc.so", "libtorch_python", "_PyObject", "_PyEval"))]
    return next((frame for frame in named if frame.startswith(("_Z", "mkl"))), named[0] if named
                else "?")
