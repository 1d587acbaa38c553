"""Embeddings: tables that are looked up, and whose rows are added."""

from __future__ import annotations

from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.index import Index
from djinn_plugins.graph.patterns.operators import LOOKUPS, SAME

_MAX_STEPS = 8
_PASSED = SAME | frozenset({"mul"})


def find_embeddings(index: Index) -> list[PatternMatch]:
    """Find lookups; lookups whose results are added form one match."""
    lookups = [position for position, name in enumerate(index.names)
               if name in LOOKUPS and len(index.nodes[position].inputs) > 1]
    ways = {lookup: _way_to_sums(index, lookup) for lookup in lookups}
    groups: dict[int, set[int]] = {}
    at_sum: dict[int, int] = {}
    for lookup in lookups:
        group = {lookup}
        for position in ways[lookup]:
            if index.names[position] == "add" and position in at_sum:
                group |= groups[at_sum[position]]
        for member in group:
            groups[member] = group
        for position in ways[lookup]:
            if index.names[position] == "add":
                at_sum.setdefault(position, lookup)
    distinct = {min(group): group for group in (groups[lookup] for lookup in lookups)}
    return [_match(index, sorted(distinct[first]), ways) for first in sorted(distinct)]


def _way_to_sums(index: Index, lookup: int) -> list[int]:
    """Follow the rows through views, scales and sums, along a single path."""
    way: list[int] = []
    here = lookup
    for _ in range(_MAX_STEPS):
        following = -1
        for reader in index.uses(here):
            name = index.names[reader]
            if name == "add" or (name in _PASSED and following < 0 and name not in ("detach", "alias")):
                following = reader
                if name == "add":
                    break
        if following < 0:
            break
        way.append(following)
        here = following
    return way


def _match(index: Index, lookups: list[int], ways: dict[int, list[int]]) -> PatternMatch:
    positions = set(lookups)
    if len(lookups) > 1:
        shared = [position for position in ways[lookups[0]]
                  if index.names[position] == "add" and any(position in ways[other] for other in lookups[1:])]
        last = max((p for p in shared), default=-1)
        for lookup in lookups:
            way = ways[lookup]
            joined = [p for p in way if index.names[p] == "add"
                      and sum(p in ways[other] for other in lookups) > 1]
            if joined:
                end = min(last, max(joined)) if last >= 0 else max(joined)
                positions.update(p for p in way if p <= end)
    tables = [index.nodes[lookup].inputs[0] for lookup in lookups]
    rows = [size[0] if (size := index.size(table)) else 0 for table in tables]
    words = max(range(len(rows)), key=lambda place: rows[place])
    size = index.size(tables[words])
    roles = dict.fromkeys(lookups, "lookup")
    roles |= {position: "sum" for position in positions if index.names[position] == "add"}
    result = index.result(max(positions)) or ""
    return index.match(
        "embedding", positions, roles=roles,
        values={"weight": tables[words], "indices": index.nodes[lookups[words]].inputs[1], "result": result},
        metadata={"lookups": len(lookups), "vocabulary": rows[words], "width": size[-1] if size else None})
