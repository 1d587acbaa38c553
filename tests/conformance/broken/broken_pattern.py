"""A pattern that finds a matrix product followed by something elementwise, and others that break a law in doing so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from djinn.hookspecs import hookimpl
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.kinds import PatternMatch

BROKEN: dict[str, tuple[str, set[str]]] = {
    "by-identifier": ("pattern.renumbering", set()),
    "names-values": ("pattern.known_nodes", {"pattern.renumbering", "pattern.well_formed"}),
    "backwards": ("pattern.known_nodes", set()),
    "overconfident": ("pattern.well_formed", set()),
    "repeats": ("pattern.well_formed", set()),
    "learns": ("pattern.deterministic", {"pattern.renumbering"}),
    "scribbles": ("pattern.graph_unchanged", set()),
    "recursive": ("pattern.deep_graph", set()),
    "overlaps": ("pattern.disjoint", set()),
}
"""Name of each broken pattern, the law that it breaks, and others that it may break as a consequence."""

_PRODUCTS = tuple(f"aten::{name}" for name in ("linear", "mm", "matmul", "bmm", "addmm", "convolution", "conv2d"))


class _Pattern:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self.capabilities = frozenset({"disjoint"} if flaw == "overlaps" else ())
        self._count = itertools.count()

    def find(self, graph: Graph) -> Sequence[PatternMatch]:
        producer = {value: node for node in graph.nodes() for value in node.outputs}
        matches = []
        for node in graph.topological_sort():
            source = next((producer[value] for value in node.inputs if value in producer), None)
            if source is not None and source is not node and source.operation in _PRODUCTS:
                matches.append(PatternMatch(self.name, (source.id, node.id), 0.9))
        if self._flaw == "recursive":
            _depth(list(graph.nodes()), 0)
        return self._spoilt(matches, graph)

    def _spoilt(self, matches: list[PatternMatch], graph: Graph) -> list[PatternMatch]:
        if self._flaw == "by-identifier":
            return [match for match in matches if match.nodes[0].startswith("n")]
        if self._flaw == "names-values":
            return [attrs.evolve(match, nodes=graph[match.nodes[0]].outputs) for match in matches]
        if self._flaw == "backwards":
            return [attrs.evolve(match, nodes=match.nodes[::-1]) for match in matches]
        if self._flaw == "overconfident":
            return [attrs.evolve(match, confidence=1.5) for match in matches]
        if self._flaw == "repeats":
            return matches * 2
        if self._flaw == "learns":
            return [attrs.evolve(match, confidence=1 / (2 + next(self._count))) for match in matches]
        if self._flaw == "overlaps":
            firsts = {match.nodes[:1]: attrs.evolve(match, nodes=match.nodes[:1]) for match in matches}
            return [*matches, *firsts.values()]
        if self._flaw == "scribbles":
            for node in graph.nodes():
                if isinstance(node.metadata, dict):
                    node.metadata["searched"] = True
        return matches


def _depth(nodes: list[GraphNode], index: int) -> int:
    return 0 if index >= len(nodes) else 1 + _depth(nodes, index + 1)


@hookimpl
def djinn_register_patterns(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Pattern(name))
