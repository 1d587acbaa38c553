"""Annotates graphs with their meaning, derived from operations, structure, and runtime observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.graph.kinds import Analyzer


@hookimpl
def djinn_register_analyzers(register: Callable[[Analyzer], None]) -> None:
    """Register the plugin's analyzer."""
    from djinn_plugins.graph.analyzer.analyzer import CoreAnalyzer

    register(CoreAnalyzer())
