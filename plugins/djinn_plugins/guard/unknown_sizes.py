"""The largest possible sizes of results whose sizes depend on elements. They count until the elements are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch

from djinn_plugins.guard.fast_sizes import Metadata

__all__ = ("LARGEST",)

Largest: TypeAlias = Callable[[Sequence[Metadata]], int]
_INDEX_BYTES = 8


def _positions(tensors: Sequence[Metadata]) -> int:
    """Bytes of the positions of all elements."""
    size = tensors[0][0]
    return prod(size) * max(len(size), 1) * _INDEX_BYTES


def _selected(tensors: Sequence[Metadata]) -> int:
    (size, _, dtype), (mask, _, _) = tensors[0], tensors[1]
    return int(prod(torch.broadcast_shapes(size, mask))) * dtype.itemsize


def _indexed(tensors: Sequence[Metadata]) -> int:
    """Bytes of the rows that masks and indices select: one for each element."""
    (size, _, dtype), *indices = tensors
    masked = [prod(mask) for mask, _, kind in indices if kind in (torch.bool, torch.uint8)]
    if not masked:
        return 0
    whole = [index for index, _, kind in indices if kind not in (torch.bool, torch.uint8)]
    rows = prod(torch.broadcast_shapes(*whole)) if whole else 1
    return max(rows, 1) * prod(size) * dtype.itemsize


def _distinct(tensors: Sequence[Metadata]) -> int:
    """Bytes of all elements, where each of them is, and how often."""
    size, _, dtype = tensors[0]
    return prod(size) * (dtype.itemsize + 2 * _INDEX_BYTES)


def _alignments(tensors: Sequence[Metadata]) -> int:
    (size, _, dtype), (targets, _, _) = tensors[0], tensors[1]
    batch = size[1] if len(size) > 2 else 1
    longest = targets[-1] if targets else 0
    return batch * (size[0] if size else 1) * (2 * longest + 1) * dtype.itemsize


LARGEST: Mapping[str, Largest] = {
    **dict.fromkeys(("nonzero", "argwhere", "nonzero_numpy"), _positions),
    "masked_select": _selected,
    **dict.fromkeys(("index", "_unsafe_index"), _indexed),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _distinct),
    "_ctc_loss": _alignments,
}
"""Bytes of all results of an operator, by its name without overload, from its tensors. Of those that are missing, the
sizes are known, or the call itself is asked once the elements are there (`djinn_plugins.guard.sizes.RESULT_BYTES`)."""
