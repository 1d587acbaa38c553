"""Workloads: what `djinn.calibrate` runs to measure the speed of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

__all__ = ("Workload",)


@attrs.frozen
class Workload:
    """A benchmark for one operation at one size: it runs that operation many times, and little else.

    The operation, its work per call and the bytes it moves are derived from the recording.
    """

    name: str
    """For example ``linear 512x192x768``."""
    prepare: Callable[[torch.device], Callable[[], Any]]
    """Creates operands on a device, and returns a function that works on them. That function is called repeatedly,
    without gradients; it records the same operations each time, and returns the tensors to compute.
    """
