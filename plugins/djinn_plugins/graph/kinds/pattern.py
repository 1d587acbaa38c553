"""Patterns find structures in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.match import PatternMatch

__all__ = ("Pattern", "PatternMatch")


class Pattern(Protocol):
    """Recognizes one structure.

    A pattern whose matches never share a node may declare it: ``capabilities = frozenset({"disjoint"})``.
    """

    name: str
    """Name in the configuration and in matches."""

    def find(self, graph: Graph) -> Sequence[PatternMatch]:
        """Find every occurrence.

        Laws:
            pattern.known_nodes, pattern.well_formed, pattern.deterministic, pattern.renumbering,
            pattern.graph_unchanged, pattern.deep_graph, pattern.disjoint
        """
