"""From an annotated graph to a page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from djinn.model.annotated import AnnotatedGraph
from djinn_exporter_html.document import document_of

SCRIPTS = ("words.js", "tree.js", "layout.js", "draw.js", "describe.js", "main.js")
"""Parts of the page's script, in order."""


class HtmlExporter:
    """Writes pages that need nothing but a browser.

    The page carries its style, its script and the graph. Its policy lets the browser run exactly that script and fetch
    nothing at all, whatever the graph's names say.
    """

    name = "html"
    suffix = ".html"

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        """Write a page."""
        Path(path).write_text(page_of(annotated), encoding="utf-8")


def page_of(annotated: AnnotatedGraph) -> str:
    """Make the page as text."""
    style = _asset("page.css")
    script = "\n".join(["(() => {", "'use strict';", *map(_asset, SCRIPTS), "})();"])
    return Template(_asset("page.html")).substitute(
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
               "form-action 'none'",
        title=html.escape(f"{annotated.profile.workload}: {len(annotated.graph.nodes())} operations"),
        style=style, script=script, data=json_in_html(document_of(annotated)))


def json_in_html(content: Any) -> str:
    """Write JSON that stands inside a script element and cannot end it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A lone surrogate is valid in Python's text and in no encoding of it.
    return text.encode("utf-8", "replace").decode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (resources.files("djinn_exporter_html") / "assets" / name).read_text(encoding="utf-8")
