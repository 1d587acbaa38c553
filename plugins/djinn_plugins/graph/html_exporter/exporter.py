"""Exports an annotated graph as a page."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path

from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.html_exporter.document import document_of
from djinn_plugins.graph.html_page import json_in_html, page

__all__ = ("HtmlExporter", "json_in_html", "page_of")

SCRIPTS = ("words.js", "tree.js", "layout.js", "draw.js", "describe.js", "main.js")
"""Parts of the page's script, in order."""


class HtmlExporter:
    """Writes pages that need nothing but a browser.

    The page contains its style, its script and the graph. Its content security policy permits only exactly that script
    and no requests at all, even if names in the graph contain markup.
    """

    name = "html"
    suffix = ".html"

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        """Write a page."""
        Path(path).write_text(page_of(annotated), encoding="utf-8")


def page_of(annotated: AnnotatedGraph) -> str:
    """Return the page as text."""
    style = _asset("page.css")
    script = "\n".join(["(() => {", "'use strict';", *map(_asset, SCRIPTS), "})();"])
    return page(_asset("page.html"), style=style, script=script, data=document_of(annotated),
                title=f"{annotated.profile.workload}: {len(annotated.graph.nodes())} operations")


@cache
def _asset(name: str) -> str:
    return (resources.files("djinn_plugins.graph.html_exporter") / "assets" / name).read_text(encoding="utf-8")
