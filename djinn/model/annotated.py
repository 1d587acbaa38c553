"""A graph with its meaning: the semantically rich graph."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from djinn.kinds.pattern import PatternMatch
from djinn.model.graph import Graph
from djinn.model.metadata import DataResidency, SemanticMetadata, Tier, WorkloadProfile


@attrs.frozen(eq=False)
class AnnotatedGraph:
    """A graph, what its nodes and values mean, and the structures in it."""

    graph: Graph
    nodes: Mapping[str, SemanticMetadata]
    """By node identifier, every node."""
    values: Mapping[str, DataResidency]
    """By value identifier, values from outside included."""
    patterns: tuple[PatternMatch, ...]
    profile: WorkloadProfile
    seconds: Mapping[Tier, float] = attrs.field(factory=dict)
    """What each tier of the analysis took."""
