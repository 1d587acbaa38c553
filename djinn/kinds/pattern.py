"""Patterns find structures in a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from djinn.model.graph import Graph


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
    """What an optimizer may make of it."""
    roles: Mapping[str, str] = attrs.field(factory=dict)
    """What single nodes are for within it, for example ``scores``, ``down_projection``."""
    values: Mapping[str, str] = attrs.field(factory=dict)
    """Values that matter to it, by identifier: ``key_cache``, ``value_cache``, ``weight``, ``query``, ..."""
    metadata: Mapping[str, Any] = attrs.field(factory=dict)
    """What else is known of it: ``heads``, ``is_causal``, ``layer``, ``is_cross``, ..."""


class Pattern(Protocol):
    """Recognises one structure."""

    name: str
    """Name in the configuration and in matches."""

    def find(self, graph: Graph) -> Sequence[PatternMatch]:
        """Find every occurrence.

        Laws:
            pattern.known_nodes, pattern.well_formed, pattern.deterministic, pattern.renumbering,
            pattern.graph_unchanged, pattern.deep_graph
        """
