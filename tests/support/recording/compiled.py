"""``torch.compile`` with djinn's backend, and what its tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import djinn


def remotely(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="djinn", **options)


def same(one: Any, other: Any) -> bool:
    """Whether results are equal, bit by bit and in metadata; of dataclasses of transformers, all tensors."""
    leaves = [[leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
              for tree in (one, other)]
    assert len(leaves[0]) == len(leaves[1]) > 0
    assert all(type(leaf) is torch.Tensor for leaf in leaves[0])
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(*leaves, strict=True))


def nodes_executed(action: Callable[[], object]) -> int:
    before = djinn.stats()["nodes_executed"]
    action()
    return djinn.stats()["nodes_executed"] - before
