"""Returns freed memory to the system after a session, and finds the sizes of memories."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from djinn.errors import ConfigurationError
from djinn.plugins import Plugins
from djinn_plugins.common.device_report import properties_of
from djinn_plugins.common.kinds.executor import Executor, SupportsDeviceReport
from djinn_plugins.common.kinds.memory import MemoryFactory

__all__ = ("SpareMemory", "default_keep_bytes", "device_bytes", "limit_arenas", "memory_plugin", "no_memory_plugin",
           "return_memory", "trim_heap")

MAX_DEFAULT_KEEP_BYTES = 4 * 2**30
SHORT_SHARE = 16
"""Memory of a device is short if less than one part in this many is free."""
MIN_KEPT_BYTES = 64 * 2**20
"""A process that keeps less gives nothing back."""
MAX_ARENAS = 2
_M_ARENA_MAX = -8
"""The parameter of glibc's mallopt(3)."""
_log = logging.getLogger("djinn.server")
_CONTROL_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit, in the two versions of Linux control groups."""


def default_keep_bytes() -> int:
    """Return the default size of the upload cache: an eighth of the memory, and 4 GiB at most."""
    memory_bytes = _physical_bytes()
    return min(MAX_DEFAULT_KEEP_BYTES, memory_bytes // 8) if memory_bytes else MAX_DEFAULT_KEEP_BYTES


def memory_plugin(plugins: Plugins, *, is_needed: bool = False) -> MemoryFactory | None:
    """Choose what keeps sessions within a memory limit; ``None`` if no plugin does, and none is needed.

    Raises:
        ConfigurationError: It is needed.
        AmbiguousPluginError, PluginError: As for `djinn.plugins.Plugins.find`.
    """
    if plugins.registered("memory") or "memory" in plugins.selection.chosen:
        found: MemoryFactory = plugins.choose("memory", "tiered")
        return found
    if is_needed:
        raise no_memory_plugin()
    return None


def no_memory_plugin() -> ConfigurationError:
    """Make the error for a memory limit that no plugin enforces."""
    return ConfigurationError("A limit of device memory needs a plugin of the kind memory, and there is none.",
                              hint="Switch djinn-memory-tiered on again, or leave out --memory-mib and the memory "
                                   "limits of tokens.")


def device_bytes(executor: Executor) -> int:
    """Return the memory of a device, or the part of it that this process may use; 0 if unknown."""
    known = properties_of(executor)
    if known.kind != "cpu":
        return known.total_bytes
    return min(filter(None, (_physical_bytes(), *map(_limit_in, _CONTROL_GROUPS))), default=0)


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    except (AttributeError, ValueError, OSError):
        # Not every system provides this.
        return 0


def _limit_in(file: str) -> int:
    """Return the limit of a control group; 0 if there is none."""
    try:
        text = Path(file).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


class SpareMemory:
    """Gives memory that a process keeps for reuse back to the device when other processes have little left there.

    An allocator keeps freed memory. A process that needs memory itself uses this first; another one cannot.

    Args:
        executor: The device. One that reports no reserved memory has nothing to give back.

    Concurrency:
        One thread.
    """

    def __init__(self, executor: Executor) -> None:
        self._able = executor if isinstance(executor, SupportsDeviceReport) else None

    def look(self) -> bool:
        """Give memory back if it is short, and return whether any was given back."""
        figures = {} if self._able is None else self._able.memory()
        if self._able is None or "reserved" not in figures:
            return False
        kept_bytes = figures["reserved"].current - figures["allocated"].current
        if kept_bytes < MIN_KEPT_BYTES or figures["free_bytes"] * SHORT_SHARE >= figures["total_bytes"]:
            return False
        self._able.free_unused()
        return True


def return_memory(executor: Executor) -> None:
    """Return freed memory to the system where the C library caches it, and to the device where its allocator does.

    Otherwise a server that once held large values in many small blocks would appear to hold them for ever, and a worker
    would keep device memory that other workers could use.
    """
    if isinstance(executor, SupportsDeviceReport):
        try:
            executor.free_unused()
        except RuntimeError as error:
            # The device may be lost, which ends the process.
            _log.info("no memory is given back to the device: %s", error)
    trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system where the C library caches it."""
    trim = _of_c_library("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


def limit_arenas() -> None:
    """Let the threads of this process share two arenas, where the C library has an arena for each thread.

    Each arena keeps freed memory: over the first thousand tokens of a text, a worker would grow by 3 %.
    """
    limit = _of_c_library("mallopt", ctypes.c_int, ctypes.c_int)
    if limit is not None:
        limit(_M_ARENA_MAX, MAX_ARENAS)


@cache
def _of_c_library(name: str, *takes: Any) -> Callable[..., int] | None:
    """Return a function of glibc; ``None`` where the C library is another one, or lacks it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    found.argtypes = takes
    found.restype = ctypes.c_int
    return cast("Callable[..., int]", found)
