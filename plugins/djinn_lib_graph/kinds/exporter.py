"""Exporters write a graph with its meaning to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from djinn_lib_graph.annotated import AnnotatedGraph


class Exporter(Protocol):
    """Writes annotated graphs in one form."""

    name: str
    """Name in the configuration."""
    suffix: str
    """How the names of its files end, for example ``.graphml``."""

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        """Write one file, which stands for itself: it needs no other file and no network to be read.

        Args:
            annotated: What to write. Not to be changed.
            path: Where to, in a folder that exists. What is there is replaced.

        Raises:
            OSError: The file cannot be written.

        Laws:
            exporter.well_formed, exporter.one_file, exporter.deterministic, exporter.replaces,
            exporter.graph_unchanged, exporter.any_graph, exporter.deep_graph
        """
