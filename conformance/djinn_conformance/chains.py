"""Short programs on a few matrices, for laws of what lies behind the recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from hypothesis import strategies as st

__all__ = ("Chain", "apply_chain", "chains", "given_matrices")

Chain: TypeAlias = tuple[tuple[str, int, int], ...]
"""Steps: the operation, and the positions of its operands among the values so far."""

SIDE = 4
_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "tanh": lambda x, y: torch.tanh(x),
    "transpose": lambda x, y: x.t(),
    "rows": lambda x, y: torch.cat([x[:2], y[2:]]),
    "add_": lambda x, y: x.add_(0.5),
    "copy_": lambda x, y: x.copy_(y.clone()),
    "fill a row": lambda x, y: x[1:2].fill_(0.25).expand(SIDE, SIDE).clone(),
}


def chains(max_steps: int = 10) -> st.SearchStrategy[Chain]:
    """Draw programs."""
    step = st.tuples(st.sampled_from(sorted(_STEPS)), st.integers(0, 15), st.integers(0, 15))
    return st.lists(step, min_size=1, max_size=max_steps).map(tuple)


def given_matrices() -> list[torch.Tensor]:
    """Make the values that programs begin with: three ``f32[4, 4]`` of small numbers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(SIDE, SIDE, generator=generator) / 4 for _ in range(3)]


def apply_chain(chain: Chain, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a program; return the values that it was given and those that it made."""
    values = list(given)
    for name, first, second in chain:
        values.append(_STEPS[name](values[first % len(values)], values[second % len(values)]))
    return values
