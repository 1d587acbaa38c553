"""Matches: structures found in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from djinn_lib_graph.graph import Graph, to_networkx

if TYPE_CHECKING:
    import networkx


@attrs.frozen
class PatternMatch:
    """One found structure."""

    pattern: str
    """Name of the pattern."""
    nodes: tuple[str, ...]
    """Identifiers of the matched nodes, in topological order."""
    confidence: float = 1.0
    """Between 0 and 1."""
    hints: Mapping[str, Any] = attrs.field(factory=dict)
    """Hints for an optimizer."""
    roles: Mapping[str, str] = attrs.field(factory=dict)
    """Roles of single nodes within the structure, for example ``scores``, ``down_projection``."""
    values: Mapping[str, str] = attrs.field(factory=dict)
    """Identifiers of important values: ``key_cache``, ``value_cache``, ``weight``, ``query``, ..."""
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    """Further properties: ``heads``, ``is_causal``, ``layer``, ``is_cross``, ..."""

    def operations(self, graph: Graph) -> tuple[str, ...]:
        """List the operations of the matched nodes, in their order."""
        return tuple(graph.get_node(node).operation for node in self.nodes)

    def subgraph(self, graph: Graph) -> networkx.MultiDiGraph[str]:
        """Return the matched nodes of ``graph`` and the edges between them."""
        return to_networkx(graph, self.nodes)
