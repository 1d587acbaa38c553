"""Analyzers annotate a graph with semantics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.match import PatternMatch
from djinn_plugins.graph.metadata import DataResidency, Tier, WorkloadProfile


@attrs.frozen
class Annotations:
    """The result of an analyzer."""

    nodes: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """By node identifier: fields of `djinn_plugins.graph.metadata.SemanticMetadata`; omitted fields stay unchanged."""
    values: Mapping[str, DataResidency] = attrs.field(factory=dict)
    """Residency by value identifier, including values from outside."""
    profile: WorkloadProfile | None = None
    """A summary of the whole, if the analyzer provides one."""
    seconds: Mapping[Tier, float] = attrs.field(factory=dict)
    """How long each tier took."""


class Analyzer(Protocol):
    """Annotates graphs."""

    name: str
    """Name in the configuration."""

    def annotate(self, graph: Graph, matches: Sequence[PatternMatch]) -> Annotations:
        """Annotate the nodes and values of a graph. Never called in the hot path; must not change the graph.

        Args:
            graph: The graph.
            matches: The matches of the pattern plugins in it.

        Laws:
            analyzer.known_nodes, analyzer.well_formed, analyzer.deterministic, analyzer.graph_unchanged,
            analyzer.deep_graph
        """
