"""Which CUDA devices a process sees: ``CUDA_VISIBLE_DEVICES``, with indices or with the UUIDs of devices and instances.

CUDA itself reads the variable once, when it starts. So a process that is to use one device gets a variable that names
only that one, before it starts CUDA; it then takes no memory on any other device. With instances of MIG, there is no
other way: CUDA shows a process only the first one that the variable names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ("VISIBLE", "count", "entry_of")

VISIBLE = "CUDA_VISIBLE_DEVICES"
_INSTANCE = "MIG-"


def count(environ: Mapping[str, str]) -> int:
    """Count the devices, without starting CUDA if that can be avoided: a process that has started it must not fork.

    PyTorch asks the driver's management library, except for instances of MIG, for which it would start CUDA. CUDA would
    find one of them; here each counts, since each can be given to another process.
    """
    given = environ.get(VISIBLE, "")
    if given.startswith(_INSTANCE) and torch.version.cuda is not None:
        return len(_entries(given))
    return torch.cuda.device_count()


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


def _entries(given: str) -> list[str]:
    return [entry for part in given.split(",") if (entry := part.strip())]
