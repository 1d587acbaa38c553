"""Kernels that lack a part of the sandbox, for servers: some system calls are answered as if there were none.

A program begins with `without(...)`'s text; everything that it starts has the same kernel.
"""

from __future__ import annotations

import errno

__all__ = ("LANDLOCK", "SECCOMP", "without")

LANDLOCK, SECCOMP = (444, None), (317, (157, 22))
"""The number of a call on x86_64; number and first argument of another one that does the same."""
_PRELUDE = """
import ctypes, struct
def _deny(call, operation=None):
    code = [(0x20, 0, 0, 0), (0x15, 0, 3 if operation is not None else 1, call)]
    if operation is not None:
        code += [(0x20, 0, 0, 16), (0x15, 0, 1, operation)]
    code += [(0x06, 0, 0, 0x00050000 | {error}), (0x06, 0, 0, 0x7FFF0000)]
    data = b"".join(struct.pack("<HBBI", *each) for each in code)
    memory = ctypes.create_string_buffer(data, len(data))
    wanted = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(memory)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, 2, wanted, 0, 0):
        libc.prctl(38, 1, 0, 0, 0)
        assert not libc.prctl(22, 2, wanted, 0, 0), ctypes.get_errno()
"""


def without(*parts: tuple[int, tuple[int, int] | None], error: int = errno.ENOSYS) -> str:
    """Return what a program does first, so that its kernel lacks parts.

    Args:
        parts: Of this module.
        error: What the kernel answers instead.
    """
    calls = [f"_deny({number})" for number, _ in parts] + [
        f"_deny({other[0]}, {other[1]})" for _, other in parts if other is not None]
    # The last filter is the one that forbids others.
    calls.sort(key=lambda call: "157" in call)
    return "\n".join([_PRELUDE.replace("{error}", str(error)), *calls, ""])
