"""Annotated graphs: a graph with its semantics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from djinn_plugins.graph.graph import Graph, to_networkx
from djinn_plugins.graph.match import PatternMatch
from djinn_plugins.graph.metadata import DataResidency, SemanticMetadata, Tier, WorkloadProfile

if TYPE_CHECKING:
    import networkx

_export: Callable[[AnnotatedGraph, str | os.PathLike[str], str], Path] | None = None


def use_export(export: Callable[[AnnotatedGraph, str | os.PathLike[str], str], Path]) -> None:
    """Let ``export`` write annotated graphs. Formats are plugins, which the model does not depend on."""
    global _export
    _export = export


@attrs.frozen(eq=False)
class AnnotatedGraph:
    """A graph, the annotations of its nodes and values, and the patterns found in it."""

    graph: Graph
    nodes: Mapping[str, SemanticMetadata]
    """By node identifier, every node."""
    values: Mapping[str, DataResidency]
    """By value identifier, including values from outside."""
    patterns: tuple[PatternMatch, ...]
    profile: WorkloadProfile
    seconds: Mapping[Tier, float] = attrs.field(factory=dict)
    """How long each tier of the analysis took."""

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """Convert to a networkx graph with all annotations as attributes.

        Attributes of a node are the fields of `djinn_plugins.graph.graph.GraphNode` and of `SemanticMetadata`, and
        ``patterns``, the positions of its matches in the graph's attribute ``patterns``; those of an edge are its
        value, its kind and the value's residency.
        """
        made = to_networkx(self.graph)
        made.graph.update(backend_type=self.graph.backend_type, fallback_reason=self.graph.fallback_reason,
                          profile=self.profile, patterns=self.patterns, values=dict(self.values))
        matches: dict[str, list[int]] = {}
        for position, match in enumerate(self.patterns):
            for node in match.nodes:
                matches.setdefault(node, []).append(position)
        for node, attributes in made.nodes.items():
            # The node's own metadata predates the analysis; the fields contain more.
            del attributes["metadata"]
            attributes.update(attrs.asdict(self.nodes[node], recurse=False))
            attributes["patterns"] = tuple(matches.get(node, ()))
        for _, _, attributes in made.edges(data=True):
            attributes["residency"] = self.values.get(attributes["value"], DataResidency.UNKNOWN)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data: mappings, lists, text, numbers. `from_dict` and JSON can read the result."""
        from djinn_plugins.graph.documents import to_plain

        return to_plain(self)

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> AnnotatedGraph:
        """Read the output of `to_dict`.

        Raises:
            DocumentError: The document is not such output.
        """
        from djinn_plugins.graph.documents import from_plain

        return from_plain(document)

    def export(self, path: str | os.PathLike[str], exporter: str = "") -> Path:
        """Write a file in the format that its suffix selects: ``.html``, ``.json``, ``.graphml``, ...

        Args:
            path: The file.
            exporter: Name of the exporter to use, regardless of the suffix.

        Returns:
            The path.

        Raises:
            PluginError: No exporter writes such files, or several do.
        """
        assert _export is not None, "import djinn tells how"
        return _export(self, path, exporter)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a single page to view in a browser; it needs no network."""
        return self.export(path, "html")

    def __repr__(self) -> str:
        from djinn_plugins.graph.display import graph_text

        return graph_text(self)

    def _repr_html_(self) -> str:
        from djinn_plugins.graph.display import graph_html

        return graph_html(self)
