"""Says what a graph means: by its operations, by its structure, and by what happened while it was made."""

from __future__ import annotations

from collections.abc import Callable

from djinn_lib_graph.kinds import Analyzer

from djinn.hookspecs import hookimpl


@hookimpl
def djinn_register_analyzers(register: Callable[[Analyzer], None]) -> None:
    """Register the plugin's one analyzer."""
    from djinn_analyzer_core.analyzer import CoreAnalyzer

    register(CoreAnalyzer())
