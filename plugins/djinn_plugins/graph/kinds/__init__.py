"""Contracts of the plugins that make, explain and write graphs."""

from __future__ import annotations

from djinn_plugins.graph.kinds.analyzer import Analyzer, Annotations
from djinn_plugins.graph.kinds.exporter import Exporter
from djinn_plugins.graph.kinds.pattern import Pattern, PatternMatch
from djinn_plugins.graph.kinds.source import GraphSource

__all__ = ("Analyzer", "Annotations", "Exporter", "GraphSource", "Pattern", "PatternMatch")
