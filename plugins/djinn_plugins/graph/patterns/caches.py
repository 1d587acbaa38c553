"""Caches of keys and values: those that grow by concatenation, and those of fixed size that are written."""

from __future__ import annotations

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.attention import find_attention_paths
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.paths import CacheStep


def find_caches(index: Index) -> list[PatternMatch]:
    """Find each growth of a cached tensor, and each write to one, that an attention reads."""
    found: dict[int, PatternMatch] = {}
    claimed: set[int] = set()
    for attention in index.once(find_attention_paths):
        for part, path in (("key", attention.key), ("value", attention.value)):
            for step in path.caches:
                if step.position not in found:
                    found[step.position] = _match(index, step, part, claimed)
    return [found[position] for position in sorted(found)]


def _match(index: Index, step: CacheStep, part: str, claimed: set[int]) -> PatternMatch:
    positions = {step.position} if step.place < 0 or step.place in claimed else {step.place, step.position}
    claimed |= positions
    size, new = index.size(step.result), index.size(step.new)
    length = new_length = None
    if size and new and len(size) == len(new):
        dimension = _dimension(index, step, size, new)
        length, new_length = size[dimension], new[dimension]
    form = "static" if step.is_static else "growing"
    return index.match(
        "kv_cache", positions, roles={step.position: "append" if not step.is_static else "write"},
        values={"cache": step.cache, "new": step.new, "result": step.result},
        metadata={"form": form, "length": length, "new_length": new_length, "part": part},
        hints={} if step.is_static else {"colocate": "cache"})


def _dimension(index: Index, step: CacheStep, size: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Return the dimension of the positions."""
    if not step.is_static or index.names[step.position] == "index_copy":
        given = index.argument(step.position, 1, "dim", default=-2)
        return given % len(size) if isinstance(given, int) else len(size) - 2
    different = [place for place, (whole, part) in enumerate(zip(size, new, strict=True)) if whole != part]
    return different[-1] if different else len(size) - 2
