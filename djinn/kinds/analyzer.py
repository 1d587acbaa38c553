"""Analyzers give a graph meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from djinn.model.graph import Graph


class Analyzer(Protocol):
    """Annotates graphs."""

    name: str
    """Name in the configuration."""

    def annotate(self, graph: Graph) -> Mapping[str, Mapping[str, Any]]:
        """Return metadata per node identifier. Never in the hot path, never changes the graph.

        Laws:
            analyzer.known_nodes, analyzer.deterministic, analyzer.graph_unchanged, analyzer.deep_graph
        """
