"""An exporter that lists operations and keeps every law, and others that do not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from djinn.hookspecs import hookimpl
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.metadata import SemanticMetadata

BROKEN: dict[str, tuple[str, set[str]]] = {
    "no-dot": ("exporter.well_formed", set()),
    "writes-nothing": ("exporter.one_file", set()),
    "leaves-more": ("exporter.one_file", set()),
    "counts": ("exporter.deterministic", {"exporter.replaces"}),
    "addresses": ("exporter.deterministic", set()),
    "overwrites": ("exporter.replaces", set()),
    "scribbles": ("exporter.graph_unchanged", {"exporter.deterministic", "exporter.replaces"}),
    "ascii-only": ("exporter.any_graph", {"exporter.one_file", "exporter.deterministic", "exporter.replaces",
                                          "exporter.graph_unchanged"}),
    "recursive": ("exporter.deep_graph", set()),
}
"""Name of each broken exporter, the law that it breaks, and others that it may break as a consequence."""


class _Exporter:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self.suffix = "list" if flaw == "no-dot" else f".{flaw}"
        self._count = itertools.count()

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        if self._flaw == "counts":
            next(self._count)
        if self._flaw == "scribbles" and isinstance(annotated.nodes, dict):
            annotated.nodes.update({node: SemanticMetadata("seen") for node in annotated.nodes})
        if self._flaw == "recursive":
            _depth(len(annotated.nodes))
        written = [f"{node.operation} {annotated.nodes[node.id].semantic_role}" for node in annotated.graph.nodes()]
        text = "\n".join([f"{len(written)} operations", *written, repr(self._count)])
        if self._flaw == "addresses":
            text += hex(id(annotated))
        if self._flaw == "writes-nothing":
            text = ""
        if self._flaw == "leaves-more":
            path.with_suffix(".log").write_text("written")
        if self._flaw == "overwrites" and path.exists():
            with path.open("r+b") as file:
                file.write(text.encode("utf-8", "replace"))
            return
        path.write_text(text, encoding="ascii" if self._flaw == "ascii-only" else "utf-8")


def _depth(left: int) -> int:
    return 0 if not left else 1 + _depth(left - 1)


@hookimpl
def djinn_register_exporters(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Exporter(name))
