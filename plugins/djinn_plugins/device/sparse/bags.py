"""Sparse gradients of ``torch.nn.EmbeddingBag``, made of operators on their components."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ("bag_gradient",)

aten = torch.ops.aten


def bag_gradient(session: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decompose ``_embedding_bag_backward`` if its result is sparse; a dense one is recorded whole.

    Source:
        ``_embedding_bag_backward_symint`` in aten/src/ATen/native/EmbeddingBag.cpp.
    """
    grad, indices, offsets, bag_of, bag_size, _, rows, scales, mode, is_sparse, *rest = args
    if not is_sparse or kwargs:
        return NotImplemented
    if indices.numel() and not bag_of.numel():
        bag_of = _bag_of_each(indices, offsets)
    return aten._embedding_bag_sparse_backward.default(
        grad, indices, offsets, bag_of, bag_size, rows, scales, mode, *rest)


def _bag_of_each(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the bag that each index is in; the kernel leaves this out where its own forward does not need it."""
    starts = offsets.new_zeros(len(indices) + 1).index_add_(0, offsets, torch.ones_like(offsets))
    starts[0] -= 1
    return starts.cumsum(0, dtype=starts.dtype)[: len(indices)]
