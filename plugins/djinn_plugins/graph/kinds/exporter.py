"""Exporters write an annotated graph to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from djinn_plugins.graph.annotated import AnnotatedGraph


class Exporter(Protocol):
    """Writes annotated graphs in one format."""

    name: str
    """Name in the configuration."""
    suffix: str
    """Suffix of its files, for example ``.graphml``."""

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        """Write one self-contained file: reading it needs no other file and no network.

        Args:
            annotated: The annotated graph. Must not be changed.
            path: The file, in an existing folder. An existing file is replaced.

        Raises:
            OSError: The file cannot be written.

        Laws:
            exporter.well_formed, exporter.one_file, exporter.deterministic, exporter.replaces,
            exporter.graph_unchanged, exporter.any_graph, exporter.deep_graph
        """
