"""Landlock: restricts which files a process can access, by folder; see landlock(7)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterable

import attrs

from djinn_plugins.server.sandbox.calls import architecture

__all__ = ("Files", "Ruleset", "version", "why_not")

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System call numbers, the same on all architectures."""
_ASK_VERSION = 1
_BENEATH = 1
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_TRUNCATE = 1 << 14
"""NVIDIA's driver opens ``/proc/self/task/*/comm`` with ``O_TRUNC`` for writing, and fails if it may not."""
_CONTROL = 1 << 15
"""``LANDLOCK_ACCESS_FS_IOCTL_DEV``."""
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _CONTROL
"""The rights that apply to files, as opposed to folders."""
_KNOWN_FILES = ((1, 0x1FFF), (2, 1 << 13), (3, _TRUNCATE), (5, _CONTROL))
"""Access rights, by the version of Landlock that introduced them."""
_NET_VERSION, _NET = 4, 3
"""Binding and connecting TCP sockets."""
_SCOPE_VERSION, _SCOPE = 6, 3
"""Abstract Unix-domain sockets of other processes, and signals to them."""
_RULE = struct.Struct("=Qi")


@attrs.frozen
class Files:
    """The files that a process may access.

    Attributes:
        readable: Files and folders to read, with everything beneath them.
        usable: Files and folders to read, write and control; nothing can be created or removed there.
    """

    readable: tuple[str, ...]
    usable: tuple[str, ...] = ()


def version() -> int:
    """Return the kernel's Landlock version; 0 if it is missing or disabled."""
    if sys.platform != "linux" or architecture() is None:
        return 0
    return max(0, int(_call(_CREATE, None, 0, _ASK_VERSION)))


def why_not() -> str:
    """Return the reason why file access cannot be restricted here; empty if it can."""
    if version():
        return ""
    return "the kernel has no Landlock (5.13 and later have it, if CONFIG_SECURITY_LANDLOCK and lsm= say so)"


class Ruleset:
    """The files that a process may access. It is prepared before the process is restricted, and applied later.

    Args:
        files: The permitted files. Missing ones are left out. Entries of ``/proc`` are kept open, as paths only.

    Raises:
        OSError: The kernel rejects it.
    """

    def __init__(self, files: Files) -> None:
        number = version()
        self._handled = sum(mask for since, mask in _KNOWN_FILES if number >= since)
        attributes = struct.pack("=QQQ", self._handled, _NET if number >= _NET_VERSION else 0,
                                 _SCOPE if number >= _SCOPE_VERSION else 0)
        # An earlier kernel knows fewer fields, and accepts further ones if they are zero.
        self._descriptor = _checked(_call(_CREATE, attributes, len(attributes), 0))
        self._add(files.readable, _READ | _LIST)
        self._add(files.usable, _READ | _LIST | _WRITE | _TRUNCATE | _CONTROL)

    def restrict(self) -> None:
        """Apply it to this thread, and to threads that it starts later.

        Raises:
            OSError: The kernel refuses, because the process may still gain privileges.
        """
        try:
            _checked(_call(_RESTRICT, self._descriptor, 0))
        finally:
            os.close(self._descriptor)

    def _add(self, paths: Iterable[str], access: int) -> None:
        for path in dict.fromkeys(paths):
            with contextlib.suppress(OSError):  # not every system has all of them
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    is_folder = stat.S_ISDIR(os.fstat(opened).st_mode)
                    allowed = access & self._handled & (-1 if is_folder else _OF_FILES)
                    rule = _RULE.pack(allowed, opened)
                    _checked(_call(_ADD, self._descriptor, _BENEATH, rule, 0))
                finally:
                    # Rules refer to inodes, and the kernel recreates those of `/proc` when memory gets short.
                    if not path.startswith("/proc/"):
                        os.close(opened)


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
