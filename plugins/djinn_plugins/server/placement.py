"""Chooses the device of a tenant's worker if a server has several devices: the one with the least load."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

__all__ = ("DeviceLoad", "default_places", "least_loaded")

_SAME = 0.05
"""Loads that differ by less, in devices, count as equal, because they are measurements of the last seconds."""


@attrs.frozen
class DeviceLoad:
    """The load of a device.

    Attributes:
        wanted: Demand of its workers in the last seconds, in devices: time spent running, or waiting for a turn.
        held_bytes: Bytes that their sessions hold.
        workers: Number of workers.
    """

    wanted: float = 0.0
    held_bytes: int = 0
    workers: int = 0


def least_loaded(loads: Sequence[DeviceLoad]) -> int:
    """Return the position of the device with the least demand, then fewest bytes held, then fewest workers."""
    return min(range(len(loads)), key=lambda index: (
        round(loads[index].wanted / _SAME), loads[index].held_bytes, loads[index].workers, index))


def default_places(devices: Sequence[str], threads: int) -> list[int]:
    """Return the default number of concurrent turns on each device.

    An accelerator has one. All CPU devices together have as many as there are cores for the threads of each.

    Args:
        devices: Their names.
        threads: Threads of operations on the CPU; 0 for PyTorch's default, which is one for each core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = sum(device == "cpu" for device in devices)
    return [max(1, cores // (threads * shared)) if device == "cpu" and threads else 1 for device in devices]
