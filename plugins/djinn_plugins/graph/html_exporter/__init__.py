"""Annotated graphs as HTML pages: self-contained files that load no other resources."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.graph.kinds import Exporter

__all__ = ("djinn_register_exporters",)


@hookimpl
def djinn_register_exporters(register: Callable[[Exporter], None]) -> None:
    """Register the plugin's exporter."""
    from djinn_plugins.graph.html_exporter.exporter import HtmlExporter

    register(HtmlExporter())
