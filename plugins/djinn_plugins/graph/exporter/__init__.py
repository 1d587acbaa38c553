"""Writes annotated graphs as JSON and as GraphML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.graph.kinds import Exporter


@hookimpl
def djinn_register_exporters(register: Callable[[Exporter], None]) -> None:
    """Register the plugin's two exporters."""
    from djinn_plugins.graph.exporter.exporters import GraphmlExporter, JsonExporter

    register(JsonExporter())
    register(GraphmlExporter())
