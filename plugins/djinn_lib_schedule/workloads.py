"""Workloads: what `djinn.calibrate` runs to find out how fast a device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

__all__ = ("Workload",)


@attrs.frozen
class Workload:
    """A piece of work that shows how fast one operation is at one size: it does that many times, and little else.

    Which operation that is, what a call of it computes and how many bytes it moves is read off its recording.
    """

    name: str
    """For example ``linear 512x192x768``."""
    prepare: Callable[[torch.device], Callable[[], Any]]
    """Makes operands on a device, and returns what works on them. That is called again and again, without gradients,
    records the same operations each time, and returns the tensors that are to be computed."""
