"""The system call filter: a kernel program built from the tables in `calls`.

libseccomp could build it, too. But wheels do not include that library, and many containers lack it; a worker there
would have no filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence

from djinn_plugins.server.sandbox.calls import (
    ABSENT,
    CHECKED,
    FREE,
    REFUSED,
    Architecture,
    ArgumentCondition,
    architecture,
    checked,
    parse,
)

__all__ = ("install", "program", "why_not")

ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
"""Actions of seccomp(2): allow the call, fail with the added error number, or kill the process."""
_LOAD, _EQUAL, _GREATER, _ANY, _RETURN, _GO = 0x20, 0x15, 0x35, 0x45, 0x06, 0x05
"""Instructions of bpf(4): load a word; jump if equal, if at least, or if any bit is common; return; jump always."""
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
_X32 = 0x40000000
"""First call number of the x32 calling convention on x86_64."""
_INSTRUCTION = struct.Struct("<HBBI")
_FILTER_MODE, _ALL_THREADS, _ASK = 1, 1, 2

_Code = tuple[int, int, int, int]


def why_not() -> str:
    """Return the reason why a filter is not possible here; empty if it is."""
    here = architecture()
    if here is None:
        return "the calls of this system are not known to djinn, which knows Linux on x86_64 and aarch64"
    action = ctypes.c_uint32(KILL)
    if ctypes.CDLL(None, use_errno=True).syscall(here.seccomp, _ASK, 0, ctypes.byref(action)):
        return f"the kernel takes no filter of system calls: {os.strerror(ctypes.get_errno())}"
    return ""


def install(*, has_driver: bool) -> None:
    """Install the filter in all threads of this process.

    Args:
        has_driver: Whether the process uses a device driver; then only calls that a driver is known not to need are
            refused.

    Raises:
        OSError: The kernel rejects it.
    """
    here = architecture()
    if here is None:
        raise OSError(errno.ENOSYS, why_not())
    code = program(here, os.getpid(), has_driver=has_driver)
    memory = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and their address
    wanted = struct.pack("@HP", len(code) // _INSTRUCTION.size, ctypes.addressof(memory))
    failed = ctypes.CDLL(None, use_errno=True).syscall(here.seccomp, _FILTER_MODE, _ALL_THREADS, wanted)
    if failed:
        # A positive result is the ID of a thread that already has its own filter.
        number = ctypes.get_errno() if failed < 0 else errno.EBUSY
        raise OSError(number, f"the kernel does not take the filter of system calls: {os.strerror(number)}")


def program(here: Architecture, process: int, *, has_driver: bool) -> bytes:
    """Return the filter in the kernel's binary form.

    Args:
        here: The architecture; calls of other architectures kill the process.
        process: The ID of the process.
        has_driver: See `install`.
    """
    free, depending, absent, refused = (parse(table, here) for table in (FREE, CHECKED, ABSENT, REFUSED))
    code: list[_Code] = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, here.audit), (_RETURN, 0, 0, KILL),
                         (_LOAD, 0, 0, _NUMBER), (_GREATER, 0, 1, _X32), (_RETURN, 0, 0, FAIL | errno.ENOSYS)]
    answers = [(free, ALLOW), (absent, FAIL | errno.ENOSYS), *([(refused, FAIL | errno.EPERM)] if has_driver else [])]
    for numbers, answer in answers:
        for number in numbers.values():
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    for call in checked(process, has_driver=has_driver):
        if call.name in depending:
            body = [*_conditions(call.checks, FAIL | call.otherwise)]
            code += [(_EQUAL, 0, len(body), depending[call.name]), *body]
    # Calls newer than the last known one were never reviewed; libraries that try them must handle their absence.
    code += [(_GREATER, 0, 1, max((free | absent | refused).values()) + 1), (_RETURN, 0, 0, FAIL | errno.ENOSYS),
             (_RETURN, 0, 0, ALLOW if has_driver else FAIL | errno.EPERM)]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


def _conditions(checks: Sequence[ArgumentCondition], failure: int) -> Iterator[_Code]:
    """Yield the code that checks a call's arguments; each condition continues with the next one or returns."""
    for check in checks:
        low = _ARGUMENTS + 8 * check.argument
        deny: _Code = (_RETURN, 0, 0, failure)
        if check.test == "null":
            yield from ((_LOAD, 0, 0, low), (_EQUAL, 1, 0, 0), deny, (_LOAD, 0, 0, low + 4), (_EQUAL, 1, 0, 0), deny)
            continue
        yield (_LOAD, 0, 0, low)
        if check.test == "clear":
            yield from ((_ANY, 0, 1, check.values[0]), deny)
        elif check.test == "set":
            for bit in _bits(check.values[0]):
                yield from ((_ANY, 1, 0, bit), deny)
        else:
            # The refusal follows the comparisons; a jump skips it or enters it.
            for place, value in enumerate(check.values):
                yield (_EQUAL, len(check.values) - place, 0, value)
            if check.test == "out":
                yield (_GO, 0, 0, 1)
            yield deny
    yield (_RETURN, 0, 0, ALLOW)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield mask & -mask
        mask &= mask - 1
