"""An analyzer that counts readers and keeps every law, and others that do not."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from djinn.hookspecs import hookimpl
from djinn.model.graph import Graph

BROKEN: dict[str, tuple[str, set[str]]] = {
    "names-values": ("analyzer.known_nodes", set()),
    "counts": ("analyzer.deterministic", set()),
    "scribbles": ("analyzer.graph_unchanged", set()),
    "recursive": ("analyzer.deep_graph", set()),
}
"""Name of each broken analyzer, the law that it breaks, and others that it may break as a consequence."""


class _Analyzer:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._count = itertools.count()

    def annotate(self, graph: Graph) -> Mapping[str, Mapping[str, Any]]:
        readers = Counter(edge.source for edge in graph.edges())
        if self._flaw == "names-values":
            return {value: {"readers": readers[node.id]} for node in graph.nodes() for value in node.outputs}
        if self._flaw == "counts":
            return {node.id: {"serial": next(self._count)} for node in graph.nodes()}
        if self._flaw == "scribbles":
            for node in graph.nodes():
                if isinstance(node.metadata, dict):
                    node.metadata["readers"] = readers[node.id]
        if self._flaw == "recursive":
            _depth(len(graph.nodes()))
        return {node.id: {"readers": readers[node.id]} for node in graph.nodes()}


def _depth(left: int) -> int:
    return 0 if not left else 1 + _depth(left - 1)


@hookimpl
def djinn_register_analyzers(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Analyzer(name))
