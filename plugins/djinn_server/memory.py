"""Returns freed memory to the system after a session, and finds the sizes of memories."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from djinn_lib_service.kinds import MemoryFactory

from djinn.errors import ConfigurationError
from djinn.plugins import Plugins

__all__ = ("default_keep_bytes", "device_bytes", "memory_plugin", "no_memory_plugin", "return_memory", "trim_heap")

MAX_DEFAULT_KEEP_BYTES = 4 * 2**30
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


def device_bytes(device: str) -> int:
    """Return the memory of a device, or the part of it that this process may use; 0 if unknown."""
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
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


def return_memory() -> None:
    """Return freed memory to the system where the C library caches it, and to the device where PyTorch caches it.

    Otherwise a server that once held large values in many small blocks would appear to hold them for ever, and a worker
    would keep device memory that other workers could use.
    """
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system where the C library caches it."""
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
        # Not every C library on Linux is glibc; others lack this function.
        return None
    trim.argtypes = [ctypes.c_size_t]
    trim.restype = ctypes.c_int
    return trim
