"""Where a tenant's worker computes, if a server has several devices: where there is least to do."""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

__all__ = ("Load", "default_places", "least_loaded")

_SAME = 0.05
"""Loads that differ by less, in devices, count as equal: they are measured, and of the last seconds."""


@attrs.frozen
class Load:
    """How much there is to do on a device.

    Attributes:
        wanted: How many devices' time its workers wanted in the last seconds: running, or waiting for a turn.
        held_bytes: What their sessions hold.
        workers: How many there are.
    """

    wanted: float = 0.0
    held_bytes: int = 0
    workers: int = 0


def least_loaded(loads: Sequence[Load]) -> int:
    """Return the position of the device with the least time wanted, then fewest bytes held, then fewest workers."""
    return min(range(len(loads)), key=lambda index: (
        round(loads[index].wanted / _SAME), loads[index].held_bytes, loads[index].workers, index))


def default_places(devices: Sequence[str], threads: int) -> list[int]:
    """Return how many turns there may be at a time on each device, if nobody says.

    One on an accelerator. CPUs have room for as many as have a core for each of their threads, all devices together.

    Args:
        devices: Their names.
        threads: Threads of operations on the CPU; 0 for as many as PyTorch sees fit, which is one for each core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared = sum(device == "cpu" for device in devices)
    return [max(1, cores // (threads * shared)) if device == "cpu" and threads else 1 for device in devices]
