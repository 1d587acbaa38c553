"""Memory that processes share by a descriptor."""

from __future__ import annotations

import fcntl
import os
import tempfile

__all__ = ("shared_memory",)


def shared_memory(name: str, size_bytes: int) -> int:
    """Return a descriptor of memory that is zero, and owned by the caller.

    Raises:
        OSError: It cannot be allocated.
    """
    can_seal = hasattr(os, "memfd_create")
    if can_seal:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.truncate(descriptor, size_bytes)
        if can_seal:
            # If one process shrank the memory, reading it would kill the others with SIGBUS.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
