"""Matches: structures found in a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from djinn_plugins.graph.graph import Graph, node_of, to_networkx

if TYPE_CHECKING:
    import networkx


@attrs.frozen(init=False)
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
    operation_sequence: tuple[str, ...] = attrs.field(default=(), eq=False, repr=False)
    """Operations of the nodes, in their order; filled in by `djinn.find_patterns`."""
    given: Any = attrs.field(default=None, eq=False, repr=False)
    """The subgraph that the pattern has given, if any; it is not written to documents."""

    def __init__(
        self, pattern: str = "", nodes: Sequence[str] = (), confidence: float = 1.0,
        hints: Mapping[str, Any] | None = None, roles: Mapping[str, str] | None = None,
        values: Mapping[str, str] | None = None, metadata: Mapping[str, Any] | None = None,
        operation_sequence: Sequence[str] | None = (), given: Any = None, *, pattern_name: str = "",
        matched_nodes: Sequence[str] = (), optimization_hints: Mapping[str, Any] | None = None, subgraph: Any = None,
    ) -> None:
        # The last are the names of earlier documents for the first, the second and the fourth, and their subgraph.
        self.__attrs_init__(
            pattern or pattern_name, tuple(nodes or matched_nodes), confidence, hints or optimization_hints or {},
            roles or {}, values or {}, metadata or {}, tuple(operation_sequence or ()),
            subgraph if given is None else given)

    @property
    def pattern_name(self) -> str:
        """Another name of ``pattern``."""
        return self.pattern

    @property
    def matched_nodes(self) -> tuple[str, ...]:
        """Another name of ``nodes``."""
        return self.nodes

    @property
    def optimization_hints(self) -> Mapping[str, Any]:
        """Another name of ``hints``."""
        return self.hints

    def operations(self, graph: Graph) -> tuple[str, ...]:
        """List the operations of the matched nodes, in their order."""
        return tuple(node_of(graph, node).operation for node in self.nodes)

    def subgraph(self, graph: Graph | None = None) -> networkx.MultiDiGraph[str]:
        """Return the matched nodes of ``graph`` and the edges between them; without it, what the pattern has given."""
        return self.given if graph is None else to_networkx(graph, self.nodes)
