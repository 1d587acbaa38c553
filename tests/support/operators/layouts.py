"""Ways for a tensor to lie in memory, in new memory that ends where it ends; and how that is written down."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def example_text(values: Mapping[str, Any]) -> str:
    """Write arguments down for people."""
    return ", ".join(f"{name}={_text(item)}" for name, item in values.items())


def _text(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        shown = f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        if list(item.stride()) != dense(list(item.shape)):
            shown += f"/stride{list(item.stride())}"
        if item.is_conj() or item.is_neg():
            shown += "/conj" if item.is_conj() else "/neg"
        if not item.dtype.is_floating_point and not item.dtype.is_complex and 0 < item.numel() <= 8:
            shown += f"={item.tolist()}"
        elif 0 < item.numel() <= 2:
            shown += f"={item.tolist()}"
        return shown
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_text, item))}]"
    return repr(item).removeprefix("torch.")


def tiled(source: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Take elements for another size from a tensor, again and again."""
    count, flat = math.prod(size), source.reshape(-1)
    if not count or not flat.numel():
        return torch.zeros(list(size), dtype=source.dtype)
    return flat[torch.arange(count) % flat.numel()].reshape(list(size))


def laid(values: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Lay a tensor out in memory of its own that ends with its last element."""
    if not values.numel():
        return torch.empty_strided(size, stride, dtype=values.dtype)
    reach = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    whole = torch.empty(reach, dtype=values.dtype)
    flat = values.reshape(-1)
    whole.copy_(flat if flat.numel() == reach else flat[:reach] if flat.numel() > reach else flat[
        torch.arange(reach) % flat.numel()])
    made = whole.as_strided(size, stride)
    if reach == math.prod(size):
        made.copy_(values)
    return made


def dense(size: Sequence[int]) -> list[int]:
    steps, step = [], 1
    for extent in reversed(size):
        steps.append(step)
        step *= max(extent, 1)
    return steps[::-1]


def _expanded(choose: random.Random) -> Callable[[list[int]], list[int]]:
    return lambda size: [0] * len(size)


def _expanded_dim(choose: random.Random) -> Callable[[list[int]], list[int]]:
    def strides(size: list[int]) -> list[int]:
        if not size:
            return []
        dims = [dim for dim, extent in enumerate(size) if extent > 1] or [0]
        dim = choose.choice(dims)
        rest = dense([1 if index == dim else extent for index, extent in enumerate(size)])
        rest[dim] = 0
        return rest

    return strides


def _overlapping(choose: random.Random) -> Callable[[list[int]], list[int]]:
    return lambda size: [choose.choice((1, 1, 2, max(step // 2, 1))) for step in dense(size)]


def _transposed(choose: random.Random) -> Callable[[list[int]], list[int]]:
    def strides(size: list[int]) -> list[int]:
        order = list(range(len(size)))
        choose.shuffle(order)
        if order == sorted(order, reverse=True):
            order.reverse()
        steps, step = [0] * len(size), 1
        for dim in order:
            steps[dim] = step
            step *= max(size[dim], 1)
        return steps

    return strides


def _gapped(choose: random.Random) -> Callable[[list[int]], list[int]]:
    factor = choose.choice((2, 3))
    return lambda size: [step * factor for step in dense(size)]


STRIDES: Mapping[str, Callable[[random.Random], Callable[[list[int]], list[int]]]] = {
    "expanded": _expanded,
    "expanded-dim": _expanded_dim,
    "overlapping": _overlapping,
    "transposed": _transposed,
    "gapped": _gapped,
}
"""Mutations that change how a tensor lies in memory, and nothing else."""
