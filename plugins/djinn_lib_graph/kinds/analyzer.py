"""Analyzers give a graph meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from djinn_lib_graph.graph import Graph
from djinn_lib_graph.match import PatternMatch
from djinn_lib_graph.metadata import DataResidency, Tier, WorkloadProfile


@attrs.frozen
class Annotations:
    """What an analyzer found."""

    nodes: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """By node identifier: fields of `djinn_lib_graph.metadata.SemanticMetadata`; what is left out stays as it is."""
    values: Mapping[str, DataResidency] = attrs.field(factory=dict)
    """Residency by value identifier, values from outside included."""
    profile: WorkloadProfile | None = None
    """The whole at a glance, from the analyzer that knows."""
    seconds: Mapping[Tier, float] = attrs.field(factory=dict)
    """What each tier took."""


class Analyzer(Protocol):
    """Annotates graphs."""

    name: str
    """Name in the configuration."""

    def annotate(self, graph: Graph, matches: Sequence[PatternMatch]) -> Annotations:
        """Say what the nodes and values of a graph are. Never in the hot path, never changes the graph.

        Args:
            graph: What was recorded.
            matches: What the pattern plugins found in it.

        Laws:
            analyzer.known_nodes, analyzer.well_formed, analyzer.deterministic, analyzer.graph_unchanged,
            analyzer.deep_graph
        """
