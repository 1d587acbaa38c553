"""An analyzer that counts readers and keeps every law, and others that do not."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from djinn.hookspecs import hookimpl
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.kinds import Annotations, PatternMatch
from djinn_plugins.graph.metadata import DataResidency, Evidence, Tier

BROKEN: dict[str, tuple[str, set[str]]] = {
    "names-values": ("analyzer.known_nodes", set()),
    "believes-matches": ("analyzer.known_nodes", set()),
    "invents-fields": ("analyzer.well_formed", set()),
    "too-sure": ("analyzer.well_formed", set()),
    "counts": ("analyzer.deterministic", set()),
    "scribbles": ("analyzer.graph_unchanged", set()),
    "recursive": ("analyzer.deep_graph", set()),
}
"""Name of each broken analyzer, the law that it breaks, and others that it may break as a consequence."""


class _Analyzer:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._count = itertools.count()

    def annotate(self, graph: Graph, matches: Sequence[PatternMatch]) -> Annotations:
        readers = Counter(edge.source for edge in graph.edges())
        nodes: dict[str, dict[str, Any]] = {node.id: {"priority": readers[node.id]} for node in graph.nodes()}
        values = {value: DataResidency.EPHEMERAL_ACTIVATION for node in graph.nodes() for value in node.outputs}
        if self._flaw == "names-values":
            nodes = {value: {"priority": 1} for value in values}
        if self._flaw == "believes-matches":
            values |= {value + "'": DataResidency.STATEFUL_KV_CACHE for m in matches for value in m.values.values()}
        if self._flaw == "invents-fields":
            nodes = {node: {"readers": readers[node]} for node in nodes}
        if self._flaw == "too-sure":
            nodes = {node: {"evidence": {"priority": Evidence(Tier.OPERATION, 1.5)}} for node in nodes}
        if self._flaw == "counts":
            nodes = {node: {"priority": next(self._count)} for node in nodes}
        if self._flaw == "scribbles":
            for node in graph.nodes():
                if isinstance(node.metadata, dict):
                    node.metadata["readers"] = readers[node.id]
        if self._flaw == "recursive":
            _depth(len(nodes))
        return Annotations(nodes, values)


def _depth(left: int) -> int:
    return 0 if not left else 1 + _depth(left - 1)


@hookimpl
def djinn_register_analyzers(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Analyzer(name))
