"""Fast shape rules for operations that loops over growing text repeat in every round, without PyTorch's kernels.

A meta kernel in Python takes a hundred microseconds, these rules take a few. They answer only simple cases, with dense
layouts, which is sufficient for a memory estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch

__all__ = ("QUICK", "Metadata")

Metadata: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Size, stride and dtype."""
Quick: TypeAlias = Callable[[Sequence[Metadata], Sequence[Any]], Sequence[Metadata] | None]
"""Returns the results of a call from its tensors and its numbers; ``None`` if the case is not simple."""


def _dense(size: tuple[int, ...], dtype: torch.dtype) -> Metadata:
    stride, steps = 1, []
    for extent in reversed(size):
        steps.append(stride)
        stride *= max(extent, 1)
    return size, tuple(reversed(steps)), dtype


def _cat(tensors: Sequence[Metadata], numbers: Sequence[Any]) -> Sequence[Metadata] | None:
    size, _, dtype = tensors[0]
    dim = numbers[0] if numbers else 0
    rank = len(size)
    if not -rank <= dim < rank or any(len(other[0]) != rank or other[2] is not dtype for other in tensors):
        return None
    dim %= rank
    rest = size[:dim] + size[dim + 1 :]
    if any(other[:dim] + other[dim + 1 :] != rest for other, _, _ in tensors):
        return None
    return (_dense((*size[:dim], sum(other[dim] for other, _, _ in tensors), *size[dim + 1 :]), dtype),)


def _pointwise(tensors: Sequence[Metadata], numbers: Sequence[Any]) -> Sequence[Metadata] | None:
    if len(tensors) != 2 or tensors[0][2] is not tensors[1][2]:
        return None
    size = []
    for one, other in zip_longest(reversed(tensors[0][0]), reversed(tensors[1][0]), fillvalue=1):
        if one != other and 1 not in (one, other):
            return None
        size.append(other if one == 1 else one)
    return (_dense(tuple(reversed(size)), tensors[0][2]),)


def _attention(tensors: Sequence[Metadata], numbers: Sequence[Any]) -> Sequence[Metadata] | None:
    size, _, dtype = tensors[0]
    if len(size) != 4:
        return None
    batch, heads, length, width = size
    # The output has the memory layout that the next layer needs: heads side by side.
    out = size, (length * heads * width, width, heads * width, 1), dtype
    return out, ((batch, heads, length), (length * heads, 1, heads), torch.float32)


def _whole_attention(tensors: Sequence[Metadata], numbers: Sequence[Any]) -> Sequence[Metadata] | None:
    (size, _, dtype), (value, _, _) = tensors[0], tensors[2]
    if not len(size) == len(value) == 4:
        return None
    batch, heads, length, width = *size[:3], value[3]
    return (((batch, heads, length, width), (length * heads * width, width, heads * width, 1), dtype),)


QUICK: Mapping[str, Quick] = {
    "aten::cat": _cat,
    **dict.fromkeys(("aten::add.Tensor", "aten::sub.Tensor", "aten::mul.Tensor"), _pointwise),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "djinn::scaled_dot_product_attention": _whole_attention,
}
"""Rules by overload. Numbers are those that a call takes, in order."""
