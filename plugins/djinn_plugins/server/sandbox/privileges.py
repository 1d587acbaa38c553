"""Privileges that a process gives up: users, capabilities, limits, and inspection by other processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ("become_nobody_else", "closed_device", "forbid_gaining", "hide", "limit", "user_for", "why_no_user")

MAX_THREADS = 4096
"""Maximum threads of a worker: PyTorch has a few for each core, and the server has one for each session."""
FIRST_USER = 0x70000000
"""Systems assign no user IDs from this value up to 2^31. A worker's user ID is this value plus its process ID."""
SMALL_FIRST_USER, SMALL_USERS = 61184, 4336
"""Used if a container has fewer user IDs: the range of dynamic service users."""
_DUMPABLE, _NO_NEW_PRIVILEGES, _KEEP_CAPABILITIES, _DROP_FROM_BOUND, _AMBIENT, _CLEAR = 4, 38, 8, 24, 47, 4
"""Operations of prctl(2)."""
_READ_ANYWHERE, _SET_GID, _SET_UID, _SET_PCAP = 2, 6, 7, 8
_CAPABILITIES = 64
_VERSION_3 = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}


def why_no_user() -> str:
    """Return the reason why workers cannot have their own users here; empty if they can."""
    if sys.platform != "linux":
        return "djinn knows how on Linux only"
    missing = [name for name, bit in (("CAP_SETUID", _SET_UID), ("CAP_SETGID", _SET_GID)) if not _has(bit)]
    if os.geteuid() != 0 or missing:
        return "the server does not run as root" if os.geteuid() else f"the server lacks {' and '.join(missing)}"
    return "" if _first_user() else "this container has too few users"


def user_for(process: int) -> int:
    """Return a user ID that no other process has."""
    first = _first_user()
    if first == FIRST_USER:
        return first + process
    taken = {user for user, _ in _processes()}
    for place in range(SMALL_USERS):
        if (user := first + (process + place) % SMALL_USERS) not in taken:
            return user
    raise OSError(errno.EAGAIN, "all users that a worker could be are taken")


def closed_device() -> str:
    """Return a device file that not all users can access; empty if they can, or there is none."""
    found = [path for pattern in ("nvidia*", "kfd", "dri/render*") for path in Path("/dev").glob(pattern)
             if stat.S_ISCHR(path.stat().st_mode)]
    return next((str(path) for path in found if path.stat().st_mode & 0o6 != 0o6), "")


def become_nobody_else(user: int | None, *, reads_anywhere: bool = False) -> None:
    """Give up all capabilities, and become another user.

    Args:
        user: The user and group ID; ``None`` to keep the current one.
        reads_anywhere: Keep the right to read all files, for example if Python is installed in root's home folder.

    Raises:
        OSError: The kernel refuses.
    """
    kept = 1 << _READ_ANYWHERE if reads_anywhere and _has(_READ_ANYWHERE) else 0
    prctl(_AMBIENT, _CLEAR)
    if _has(_SET_PCAP):
        for capability in range(_CAPABILITIES):
            with contextlib.suppress(OSError):  # this kernel knows fewer capabilities
                prctl(_DROP_FROM_BOUND, capability)
    if user is not None:
        prctl(_KEEP_CAPABILITIES, 1)
        os.setgroups(())
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _keep_capabilities(kept)


def forbid_gaining() -> None:
    """Never gain privileges again, not even by executing a program."""
    prctl(_NO_NEW_PRIVILEGES, 1)


def hide() -> None:
    """Prevent other processes of the same user from inspecting this one, and disable core dumps."""
    prctl(_DUMPABLE, 0)


def limit(*, has_driver: bool) -> None:
    """Limit threads and descriptors, disable core dumps, and prevent files from growing.

    Args:
        has_driver: Whether the process uses a device driver; some drivers grow files in memory.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A log that is a file must be able to grow.
    if not has_driver and not any(map(_is_file, (1, 2))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    threads = MAX_THREADS + sum(count for user, count in _processes() if user == os.getuid())
    bound = threads if hard == resource.RLIM_INFINITY else min(hard, threads)
    resource.setrlimit(resource.RLIMIT_NPROC, (bound, bound))


def prctl(operation: int, first: int = 0) -> None:
    """Apply a process-control operation of the kernel to this process or thread.

    Raises:
        OSError: The kernel refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(operation, ctypes.c_ulong(first), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {operation}: {os.strerror(number)}")


def _keep_capabilities(mask: int) -> None:
    header = struct.pack("=Ii", _VERSION_3, 0)
    data = struct.pack("=6I", mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0, mask >> 32, mask >> 32, 0)
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_CAPSET[os.uname().machine], header, data):
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")


def _has(capability: int) -> bool:
    """Whether this process has a capability in effect."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def _first_user() -> int:
    """Return the first user ID of workers; 0 if none are available."""
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    for first, count in ((FIRST_USER, 2**22), (SMALL_FIRST_USER, SMALL_USERS)):
        if any(begin <= first and first + count <= begin + length for begin, _, length in ranges):
            return first
    return 0


def _processes() -> Iterator[tuple[int, int]]:
    """Yield the user and the number of threads of each process. Owners of folders are unreliable: some are hidden."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # the process has ended
                fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                yield int(fields["Uid"].split()[0]), int(fields["Threads"])


def _is_file(descriptor: int) -> bool:
    with contextlib.suppress(OSError):  # it is closed
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    return False
