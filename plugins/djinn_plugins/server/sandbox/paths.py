"""The files that a worker needs: files that Python, PyTorch and the C library read on first use."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from djinn_plugins.server.sandbox.landlock import Files

__all__ = ("beneath", "files_for", "unreadable_for_others")

_SYSTEM = (
    # Libraries, and the files that locate them.
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/nix/store", "/gnu/store",
    # Locales, time zones and character sets.
    "/usr/share/locale", "/usr/share/zoneinfo", "/etc/localtime", "/usr/share/i18n",
    # Information about the machine, which OpenMP, oneDNN and the C library read on first use.
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/version", "/proc/filesystems", "/proc/sys/vm",
    "/proc/sys/kernel/osrelease", "/proc/sys/kernel/version", "/sys/devices/system", "/sys/kernel/mm",
    "/sys/fs/cgroup", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
)
_OF_ITSELF = tuple(f"/proc/self/{entry}" for entry in (
    "auxv", "cgroup", "cmdline", "fd", "limits", "maps", "smaps", "smaps_rollup", "stat", "statm", "status"))
"""Information about the process itself. The essential one is its memory map, which locates its threads' stacks; ``net``
and ``task/*/net`` are left out, because they list all connections of the machine."""
_DRIVER_READS = ("/sys", "/proc/driver", "/proc/devices", "/proc/modules", "/usr/share/nvidia", "/usr/local/cuda",
                 "/opt/rocm", "/etc/nvidia", "/etc/OpenCL")
_DRIVER_USES = ("/dev", "/proc/self")
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""Variable with a folder of pipes to a service that shares a device among processes."""


def files_for(*, has_driver: bool) -> Files:
    """Return the files that a worker needs; called in the process that becomes the worker.

    Args:
        has_driver: Whether the process uses a device driver.
    """
    found = [*_SYSTEM, *_OF_ITSELF, *_of_python()]
    return Files(tuple(found + list(_DRIVER_READS) if has_driver else found),
                 (*_DRIVER_USES, *filter(None, [os.environ.get(_PIPES)])) if has_driver else ("/dev/null",))


def _of_python() -> Iterator[str]:
    """Yield the folders of modules, and the libraries that this process has mapped or may load."""
    yield from (path for path in sys.path if path and Path(path).exists())
    yield from (path for name, path in sysconfig.get_paths().items() if name.endswith(("stdlib", "lib")))
    yield from site.getsitepackages()
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix}:
        yield from (str(Path(prefix) / "lib"), str(Path(prefix) / "lib64"), str(Path(prefix) / "pyvenv.cfg"))
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    yield from sorted({str(Path(path).parent) for path in _mapped() if ".so" in Path(path).name})


def _mapped() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/"):] if "/" in line else ""
        if path and "(deleted)" not in path:
            yield path


def unreadable_for_others(paths: Iterable[str]) -> str:
    """Return a path that users without special rights cannot read; empty if they can read all that exist."""
    for path in map(Path, paths):
        try:
            real = path.resolve()
            needed = 0o5 if real.is_dir() else 0o4
            if (real.stat().st_mode & needed) != needed:
                return str(real)
            shut = next((folder for folder in real.parents if not folder.stat().st_mode & 0o1), None)
        except OSError:
            # It does not exist, or is inaccessible: then there is nothing to read either.
            continue
        if shut is not None:
            return str(shut)
    return ""


def beneath(path: str, files: Files) -> str:
    """Return the readable folder that contains a path; empty if none does."""
    real = Path(path).resolve()
    return next((folder for folder in files.readable
                 if real == Path(folder).resolve() or Path(folder).resolve() in real.parents), "")
