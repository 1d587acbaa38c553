"""Masks: recognises causal masks, which hide later positions."""

from __future__ import annotations

from djinn_plugins.graph.patterns.index import Index

_TRIANGLES = frozenset({"tril", "triu", "tril_indices", "triu_indices"})
_ORDERS = frozenset({"le", "ge", "lt", "gt", "less_equal", "greater_equal", "less", "greater"})
_MAX_NODES = 60


def is_causal_mask(index: Index, mask: str, before: int) -> bool:
    """Whether a mask was made from a triangle, or from a comparison of positions with positions.

    A triangle from outside the graph cannot be distinguished from any other mask.
    """
    known: dict[str, bool] = index.once(_known_masks)
    root = index.root(mask, before)
    if root not in known:
        known[root] = _search(index, mask, before)
    return known[root]


def _known_masks(index: Index) -> dict[str, bool]:
    return {}


def _search(index: Index, mask: str, before: int) -> bool:
    pending, seen = [(mask, before)], set[int]()
    while pending and len(seen) < _MAX_NODES:
        value, reader = pending.pop()
        position = index.source(value, reader)
        if position < 0 or position in seen or index.linear(position) is not None:
            continue
        seen.add(position)
        if index.names[position] in _TRIANGLES or (index.names[position] in _ORDERS and _is_outer(index, position)):
            return True
        pending += [(value, position) for value in index.nodes[position].inputs]
    return False


def _is_outer(index: Index, position: int) -> bool:
    """Whether a comparison compares a column with a row."""
    sizes = [index.size(value) for value in index.nodes[position].inputs]
    if len(sizes) != 2 or any(size is None for size in sizes):
        return False
    left, right = ((1, 1, *(size or ()))[-2:] for size in sizes)
    return (left[0] == 1 and right[1] == 1) or (left[1] == 1 and right[0] == 1)
