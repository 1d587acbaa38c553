"""The path of a query, key or value from its projection to the attention, through caches and rotations."""

from __future__ import annotations

import attrs

from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.operators import (
    ACTIVATIONS,
    ARITHMETIC,
    CACHE_WRITES,
    FACTORIES,
    FUSED_NORMS,
    PARTS,
    REORDERINGS,
    SAME,
    VIEWS,
)

_MAX_NODES = 80
_PASSED = SAME | PARTS | ARITHMETIC | REORDERINGS | frozenset(FUSED_NORMS) | frozenset({
    "cat", "stack", "mean", "view_as_complex", "view_as_real", "polar", "complex", "sum", "linalg_vector_norm",
    "constant_pad_nd", "flip", "copy", "slice_scatter", "select_scatter", "index_put", "_index_put_impl",
    "index_copy"})
_ENDS = frozenset({"cos", "sin", "cumsum", "exp"})
_PAST = SAME | PARTS | REORDERINGS


@attrs.frozen
class CacheStep:
    """One growth of a cache, or one write to one."""

    position: int
    """The node that grows or writes."""
    cache: str
    """The previous content."""
    new: str
    """The appended or written value."""
    result: str
    is_static: bool
    place: int
    """The view that is written to, by position; -1 if there is none."""


@attrs.frozen
class Path:
    """The origin of an attention's operand."""

    nodes: tuple[int, ...]
    """Between the projections and the attention, in program order."""
    projections: tuple[int, ...]
    sources: frozenset[str]
    """The inputs of the projections, or the end of the path if there are none."""
    caches: tuple[CacheStep, ...]
    repeats: int
    """How often each head was repeated."""


def path_to_projection(index: Index, value: str, before: int) -> Path:
    """Go back from an operand of an attention to the nearest products with weights."""
    pending, seen = [(value, before)], set[int]()
    projections: set[int] = set()
    sources: set[str] = set()
    caches: list[CacheStep] = []
    ends: set[str] = set()
    repeats = 1
    while pending and len(seen) < _MAX_NODES:
        value, reader = pending.pop()
        position = index.source(value, reader)
        if position in seen:
            continue
        if position < 0:
            ends.add(value)
            continue
        linear = index.linear(position)
        if linear is not None:
            projections.add(position)
            sources.add(index.root(linear[0], position))
            # A cache may hold values that are projected only when they are read.
            behind = index.source(*index.upstream(linear[0], position, SAME | PARTS))
            step = cache_step(index, behind) if behind >= 0 else None
            if step is not None:
                caches.append(step)
                sources.add(index.root(step.new, behind))
            continue
        name, inputs = index.names[position], index.nodes[position].inputs
        step = cache_step(index, position)
        if step is not None:
            seen.add(position)
            caches.append(step)
            pending.append((step.new, position))
            continue
        if name in _ENDS or name in FACTORIES or (name not in _PASSED and name not in ACTIVATIONS):
            ends.add(value)
            continue
        seen.add(position)
        repeats *= _repeated(index, position, name)
        followed = inputs[:1] if name in _FIRST_ONLY else inputs
        pending += [(operand, position) for operand in followed]
    if not projections:
        sources |= {end for end in ends if index.producer(end) >= 0 and index.names[index.producer(end)] not in _ENDS}
    between = _between(index, seen, projections, caches)
    if not caches:
        caches += _written_beside(index, between)
    return Path(between, tuple(sorted(projections)), frozenset(sources), tuple(caches), repeats)


def _written_beside(index: Index, between: tuple[int, ...]) -> list[CacheStep]:
    """Find a cache that is written for later steps, but not read in this one."""
    for position in reversed(between):
        for reader in index.uses(position):
            ends = [reader] if index.names[reader] != "slice" else list(index.uses(reader))
            for end in ends:
                if index.names[end] == "copy" and len(index.nodes[end].inputs) > 1 and end not in between:
                    step = cache_step(index, end)
                    made = index.producer(step.cache) if step is not None else -1
                    if step is not None and (made < 0 or index.names[made] == "zeros"):
                        return [step]
    return []


_FIRST_ONLY = SAME | PARTS | REORDERINGS | frozenset(FUSED_NORMS)


def _between(index: Index, seen: set[int], projections: set[int], caches: list[CacheStep]) -> tuple[int, ...]:
    """Keep the nodes through which a projection reaches the attention; others prepare angles, weights and masks."""
    if not projections:
        return tuple(sorted(seen)) if caches else tuple(p for p in sorted(seen) if index.names[p] in VIEWS)
    kept = set(projections)
    for position in sorted(seen):
        if any(index.source(value, position) in kept for value in index.nodes[position].inputs):
            kept.add(position)
    return tuple(sorted(kept - projections))


def _repeated(index: Index, position: int, name: str) -> int:
    """Return how often a node repeats its heads."""
    if name not in ("expand", "repeat_interleave", "repeat", "index_select"):
        return 1
    before, after = index.size(index.nodes[position].inputs[0]), index.size(index.result(position) or "")
    if not before or not after:
        return 1
    if name == "expand":
        # Heads are repeated along a separate dimension, after theirs or next to the positions.
        grown = [now for then, now in zip(before, after[len(after) - len(before):], strict=False) if then != now]
        return grown[0] if len(grown) == 1 and len(before) == 5 else 1
    changed = [now // then for then, now in zip(before[1:], after[1:], strict=False) if then and now != then]
    return changed[0] if len(before) == len(after) == 4 and len(changed) == 1 else 1


def cache_step(index: Index, position: int) -> CacheStep | None:
    """Recognise a node that extends a cache, or writes to one."""
    name = index.names[position]
    if name == "cat":
        return _growth(index, position)
    if name in CACHE_WRITES:
        return _write(index, position, CACHE_WRITES[name])
    return None


def _growth(index: Index, position: int) -> CacheStep | None:
    """Recognise growth: a new value is appended to a value from outside, or to an earlier growth."""
    node = index.nodes[position]
    if len(node.inputs) != 2:  # the past and the new
        return None
    past, new = node.inputs
    size = index.size(new)
    if size is None or len(size) < 3:  # positions, and more than one number for each
        return None
    dimension = index.argument(position, 1, "dim", 0)
    if isinstance(dimension, int) and dimension % len(size) == len(size) - 1 and node.arguments:
        return None
    result = index.result(position)
    if result is None or index.source(new, position) < 0 or not _is_past(index, past, position):
        return None
    return CacheStep(position, past, new, result, False, -1)


def _is_past(index: Index, past: str, before: int) -> bool:
    size = index.size(past)
    if size is not None and 0 in size:
        return True
    value, before = index.upstream(past, before, _PAST)
    position = index.source(value, before)
    if position < 0:
        return True
    if index.names[position] == "cat":
        return cache_step(index, position) is not None
    return False


def _write(index: Index, position: int, place: int) -> CacheStep | None:
    """Recognise a partial write to a cache of fixed size, which is from outside, or is initialized with zeros."""
    written, new = index.operand(position, 0), index.operand(position, place)
    if written is None or new is None or len(index.nodes[position].inputs) < 2:
        return None
    view = index.producer(written)
    is_part = view >= 0 and index.names[view] in PARTS | VIEWS
    root = index.upstream(written, position, PARTS | VIEWS)[0] if is_part else written
    made = index.producer(root)
    if made >= 0 and index.names[made] not in FACTORIES and index.names[made] not in CACHE_WRITES:
        return None
    size, whole = index.size(new), index.size(root)
    if size is None or whole is None or len(whole) < 3 or index.source(new, position) < 0:
        return None
    if size[-1] != whole[-1]:
        return None  # features are joined there, not positions
    result = index.result(position) if index.nodes[position].outputs else root
    return CacheStep(position, root, new, result or root, True, view if is_part else -1)
