"""Which CUDA devices a process sees: ``CUDA_VISIBLE_DEVICES``, with indices or with the UUIDs of devices and instances.

CUDA itself reads the variable once, when it starts. So a process that is to use one device gets a variable that names
only that one, before it starts CUDA; it then takes no memory on any other device. With instances of MIG, there is no
other way: CUDA shows a process only the first one that the variable names.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import torch

__all__ = ("VISIBLE", "count", "count_here", "entry_of", "without_mps")

VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""Folder of the pipes to NVIDIA's Multi-Process Service."""
NO_PIPES = "/nonexistent/nvidia-mps"
_INSTANCE = "MIG-"
_COUNTING = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""
_COUNTING_TIMEOUT_S = 60.0


def count(environ: Mapping[str, str]) -> int:
    """Count the devices without starting CUDA in this process: a process that has started it must not fork.

    PyTorch asks the driver's management library. Where there is none, PyTorch would start CUDA, so another process asks
    the driver itself.
    """
    is_unknown = torch.version.cuda is not None and not torch.cuda.is_initialized() and (
        torch.cuda._device_count_nvml() < 0)
    if is_unknown and not _instances(environ) and sys.platform == "linux":
        return _counted_elsewhere(environ)
    return count_here(environ)


def count_here(environ: Mapping[str, str]) -> int:
    """Count the devices in a process that may start CUDA.

    Of several instances of MIG, CUDA would find one; here each counts, since each can be given to another process.
    """
    return len(_instances(environ)) or torch.cuda.device_count()


def _counted_elsewhere(environ: Mapping[str, str]) -> int:
    try:
        done = subprocess.run(  # noqa: S603  # this interpreter, with a program of its own
            [sys.executable, "-I", "-S", "-c", _COUNTING], env=dict(environ), check=False, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, timeout=_COUNTING_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # Without a driver, it has failed to load the driver's library.
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else 0


def _instances(environ: Mapping[str, str]) -> list[str]:
    given = environ.get(VISIBLE, "")
    return _entries(given) if given.startswith(_INSTANCE) and torch.version.cuda is not None else []


def entry_of(device: str, environ: Mapping[str, str]) -> str:
    """Return what the variable has to say so that a process sees one of these devices only; empty if nothing does.

    Args:
        device: The device, as a process with these environment variables names it.
        environ: Environment variables.
    """
    if torch.version.cuda is None:
        return ""
    kind, _, index = device.partition(":")
    position = int(index or 0) if kind == "cuda" and (index or "0").isdecimal() else -1
    given = environ.get(VISIBLE)
    if position < 0 or given is None:
        return str(position) if position >= 0 else ""
    entries = _entries(given)
    return entries[position] if position < len(entries) else ""


def without_mps(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what an environment needs so that CUDA uses the Multi-Process Service only if it says where that is.

    CUDA connects to a service that runs in the usual place by itself. It lets processes of one user in at a time, so
    workers with users of their own would wait for each other; and a kernel that fails fails for all of its processes.
    """
    return {} if MPS_PIPES in environ else {MPS_PIPES: NO_PIPES}


def _entries(given: str) -> list[str]:
    return [entry for part in given.split(",") if (entry := part.strip())]
