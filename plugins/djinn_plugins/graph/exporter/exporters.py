"""The exporters ``json`` and ``graphml``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import attrs

from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.documents import text_of

_HEAD = '<?xml version="1.0" encoding="utf-8"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
_NOTHING = frozenset({"", "{}", "[]", "null"})
_UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32) if chr(code) not in "\t\n\r"}
"""Characters that XML cannot represent."""


class JsonExporter:
    """Writes the complete graph. ``AnnotatedGraph.from_dict(json.load(file))`` reads it."""

    name = "json"
    suffix = ".json"

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        """Write the result of `AnnotatedGraph.to_dict`."""
        path.write_text(json.dumps(annotated.to_dict(), allow_nan=False, separators=(",", ":")), encoding="utf-8")


class GraphmlExporter:
    """Writes the format of graph editors and libraries: nodes, edges, and their known attributes.

    Attributes are those of `AnnotatedGraph.to_networkx`. Text, numbers and booleans are written as such, other values
    as JSON. Empty and unknown values are omitted.
    """

    name = "graphml"
    suffix = ".graphml"

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        """Write the graph with all known attributes."""
        known = annotated.to_networkx()
        keys: dict[tuple[str, str, str], str] = {}
        body = ['<graph edgedefault="directed">', *_data(keys, "graph", known.graph)]
        for node, attributes in known.nodes.items():
            body += [f"<node id={quoteattr(node)}>", *_data(keys, "node", attributes), "</node>"]
        for number, (source, target, attributes) in enumerate(known.edges(data=True)):
            body += [f'<edge id="e{number}" source={quoteattr(source)} target={quoteattr(target)}>',
                     *_data(keys, "edge", attributes), "</edge>"]
        head = [f'<key id="{key}" for="{scope}" attr.name={quoteattr(name)} attr.type="{kind}"/>'
                for (scope, name, kind), key in keys.items()]
        path.write_text("\n".join([_HEAD, *head, *body, "</graph>", "</graphml>", ""]), encoding="utf-8")


def _data(keys: dict[tuple[str, str, str], str], scope: str, attributes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the elements for attributes with values, and record their names and types as keys."""
    for name, value in attributes.items():
        kind, text = _scalar(value)
        if text not in _NOTHING:
            key = keys.setdefault((scope, name, kind), f"k{len(keys)}")
            yield f'<data key="{key}">{text}</data>'


def _scalar(value: Any) -> tuple[str, str]:
    """Return GraphML's type name for a value, and the value as text."""
    if isinstance(value, bool):
        return "boolean", str(value).lower()
    if isinstance(value, int):
        return "long", str(value)
    if isinstance(value, float):
        return "double", repr(value)
    text = value if isinstance(value, str) else json.dumps(value, default=_plain)
    return "string", escape(str(text).translate(_UNPRINTABLE))


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent."""
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    return dict(value) if isinstance(value, Mapping) else text_of(value)
