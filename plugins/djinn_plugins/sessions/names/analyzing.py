"""The analyzer, as earlier documents describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from djinn_plugins.graph.analysis import annotate_graph
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.match import PatternMatch
from djinn_plugins.graph.metadata import WorkloadProfile
from djinn_plugins.sessions.names.patterns import PatternRegistry

__all__ = ("MatchesPatterns", "SemanticAnalyzer")


class MatchesPatterns(Protocol):
    """Finds patterns in a graph."""

    def match_patterns(self, graph: Graph) -> Sequence[PatternMatch]:
        """Find them."""


class SemanticAnalyzer:
    """Annotates graphs with the installed analyzers. A graph is analyzed once.

    Args:
        pattern_registry: The patterns to look for; by default, the installed ones.
        pattern_matcher: What looks for patterns, instead of a registry.
    """

    def __init__(
        self, pattern_registry: PatternRegistry | None = None, pattern_matcher: MatchesPatterns | None = None
    ) -> None:
        self.pattern_registry = pattern_registry
        self.pattern_matcher: MatchesPatterns | None = pattern_matcher or pattern_registry
        self._known: WeakKeyDictionary[Graph, AnnotatedGraph] = WeakKeyDictionary()
        self._stats: dict[str, float] = {}

    def analyze_graph(self, graph: Graph) -> WorkloadProfile:
        """Summarize a graph."""
        return self.annotate(graph).profile

    def annotate(self, graph: Graph) -> AnnotatedGraph:
        """Annotate a graph."""
        known = self._known.get(graph)
        if known is None:
            matches = None if self.pattern_matcher is None else self.pattern_matcher.match_patterns(graph)
            known = self._known[graph] = annotate_graph(graph, matches)
            for tier, seconds in known.seconds.items():
                self._stats[str(tier)] = self._stats.get(str(tier), 0.0) + seconds
        return known

    @property
    def stats(self) -> Mapping[str, float]:
        """Seconds that each tier of the analysis has taken in all."""
        return dict(self._stats)
