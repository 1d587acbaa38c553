"""The form of all workloads: a chain of calls of one operation, each of which takes the previous result.

So at any time one result is alive, as in a model, and memory is reused in the same way. Values are chosen so that they
neither grow nor vanish along the chain: arithmetic with numbers close to zero is slow, and models do not do it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from djinn_plugins.schedule.workloads import Workload

RUN_BYTES = 15e6
"""Approximate bytes that a run moves,"""
RUN_FLOPS = 1.5e8
"""or operations that it computes: some milliseconds on one core, and enough launches on faster devices."""
MIN_CALLS, MAX_CALLS = 4, 60


def calls_for(size_bytes: float, flops: float = 0.0) -> int:
    """Return the number of calls in a run."""
    wanted = min(RUN_BYTES / max(size_bytes, 1.0), RUN_FLOPS / max(flops, 1.0))
    return int(min(max(wanted, MIN_CALLS), MAX_CALLS))


def chain(
    name: str,
    calls: int,
    make: Callable[[torch.device], tuple[Any, Sequence[Any]]],
    step: Callable[[Any, Any], Any],
) -> Workload:
    """Create a workload.

    Args:
        name: Its name.
        calls: Number of calls in a run.
        make: Returns the first call's input, and operands, which calls use in rotation.
        step: One call: takes the previous result and an operand.
    """

    def prepare(device: torch.device) -> Callable[[], Any]:
        first, operands = make(device)
        # A run starts where the one before has ended, so that no run finds what it needs in a cache.
        rotation = itertools.cycle(operands)

        def run() -> Any:
            value = first
            for operand in itertools.islice(rotation, calls):
                value = step(value, operand)
            return value

        return run

    return Workload(name, prepare)


def ones(device: torch.device, *size: int, value: float = 1.0) -> torch.Tensor:
    """Create a tensor of one value."""
    return torch.full(size, value, device=device)


def varied(device: torch.device, *size: int) -> torch.Tensor:
    """Create a tensor of values from -1 to 1 in no visible order, for operations that compare them.

    It uses digits of a sine and not random numbers, because those belong to the session.
    """
    return ((torch.arange(math.prod(size), device=device) * 12.9898).sin() * 43758.5453).frac().view(size)
