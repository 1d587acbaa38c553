"""The form of all workloads: calls of one operation, of which each goes on with what the one before gave.

So at any time one result is alive, as in a model, and memory is used again as there. Values are such that they neither
grow nor vanish on the way: arithmetic with what is hardly above zero is slow, and no model does it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from djinn_lib_schedule.workloads import Workload

RUN_BYTES = 15e6
"""About how much a run moves,"""
RUN_FLOPS = 1.5e8
"""or computes: some milliseconds on one core, and enough launches on what is faster."""
MIN_CALLS, MAX_CALLS = 4, 60


def calls_for(size_bytes: float, flops: float = 0.0) -> int:
    """Choose how many calls make a run."""
    wanted = min(RUN_BYTES / max(size_bytes, 1.0), RUN_FLOPS / max(flops, 1.0))
    return int(min(max(wanted, MIN_CALLS), MAX_CALLS))


def chain(
    name: str,
    calls: int,
    make: Callable[[torch.device], tuple[Any, Sequence[Any]]],
    step: Callable[[Any, Any], Any],
) -> Workload:
    """Make a workload.

    Args:
        name: Its name.
        calls: How many calls a run makes.
        make: Gives what the first call begins with, and operands, which calls use in turn.
        step: One call: from what the one before gave, and an operand.
    """

    def prepare(device: torch.device) -> Callable[[], Any]:
        first, operands = make(device)

        def run() -> Any:
            value = first
            for operand in itertools.islice(itertools.cycle(operands), calls):
                value = step(value, operand)
            return value

        return run

    return Workload(name, prepare)


def ones(device: torch.device, *size: int, value: float = 1.0) -> torch.Tensor:
    """Make a tensor of one value."""
    return torch.full(size, value, device=device)


def varied(device: torch.device, *size: int) -> torch.Tensor:
    """Make a tensor of values from -1 to 1 in no visible order, for what goes by comparing them.

    Not of random numbers, which are the session's: the digits of a sine that nobody looks at are as good.
    """
    return ((torch.arange(math.prod(size), device=device) * 12.9898).sin() * 43758.5453).frac().view(size)
