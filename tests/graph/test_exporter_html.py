"""The page as a file: it carries everything, fetches nothing, and nothing in a graph becomes a part of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.pages.pictures import annotated_by_modules, captured
from torch import nn

import djinn
from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.graph.html_exporter.document import document_of
from djinn_plugins.graph.html_exporter.exporter import HtmlExporter, json_in_html, page_of
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import SemanticMetadata

HOSTILE = "</script><script>document.title='taken'</script><!-- \u2028 ' \" & ]]> <img src=x onerror=alert(1)>"
ADDRESSES = ("src", "href", "action", "data", "srcset", "poster", "background", "style")


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    djinn.init()
    yield
    djinn.shutdown()


class Elements(HTMLParser):
    """What a browser would make of the page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.contents: list[tuple[str, dict[str, str | None], str]] = []
        self._last: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._last = (tag, dict(attributes))
        self.attributes.append(self._last)

    def handle_endtag(self, tag: str) -> None:
        self._last = ("", {})

    def handle_data(self, data: str) -> None:
        self.contents.append((*self._last, data))

    def text_of(self, tag: str, **wanted: str) -> str:
        return "".join(data for name, attributes, data in self.contents
                       if name == tag and wanted.items() <= attributes.items())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.ln_1, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.ln_1(self.first(x)).relu_())


def annotated() -> AnnotatedGraph:
    def work(model: Any) -> None:
        with torch.inference_mode():
            model(torch.ones(3, 4))

    return annotated_by_modules(captured(Model(), work), (ExecutionPhase.FORWARD,))


def hostile() -> AnnotatedGraph:
    known = annotated()
    first, *rest = known.graph.nodes()
    renamed = attrs.evolve(first, operation=f"evil::{HOSTILE}", origin=attrs.evolve(first.origin, line=HOSTILE))
    graph = RecordedGraph((renamed, *rest), values={
        value: attrs.evolve(info, name=HOSTILE) for value, info in known.graph.values.items()})
    nodes = {**known.nodes, first.id: SemanticMetadata(
        HOSTILE, module_path=HOSTILE, model_module=HOSTILE, semantic_role=HOSTILE, call_index=0,
        workload_hints={HOSTILE: [HOSTILE, float("nan"), object, {1: b"\xff"}]})}
    match = PatternMatch(HOSTILE, (first.id,), hints={HOSTILE: HOSTILE}, metadata={HOSTILE: {HOSTILE: "\ud800"}})
    return attrs.evolve(known, graph=graph, nodes=nodes, patterns=(*known.patterns, match), profile=attrs.evolve(
        known.profile, workload=HOSTILE, patterns={HOSTILE: 1}))


@pytest.mark.parametrize("make", [annotated, hostile])
def test_the_page_refers_to_nothing_outside_and_runs_only_its_own_script(make) -> None:
    page = page_of(make())
    elements = Elements(page)
    for tag, attributes in elements.attributes:
        assert not set(ADDRESSES) & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
    style = elements.text_of("style")
    script = elements.text_of("script").replace(elements.text_of("script", id="graph"), "")
    # The one address is a name of a namespace, which nobody fetches.
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#arrow\))|fetch\(|XMLHttpRequest|WebSocket|import\(", script + style)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", script)
    (policy,) = (a["content"] for tag, a in elements.attributes if tag == "meta" and "http-equiv" in a)
    allowed = dict(rule.split(" ", 1) for rule in str(policy).split("; "))
    assert allowed["default-src"] == "'none'"
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[kind] == f"'sha256-{digest}'"
    assert len([tag for tag, _ in elements.attributes if tag == "script"]) == 2


def test_names_arrive_as_they_are() -> None:
    data = json.loads(Elements(page_of(hostile())).text_of("script", id="graph"))
    node = data["nodes"][0]
    assert (node["module"], node["role"], node["line"]) == (HOSTILE, HOSTILE, HOSTILE)
    assert node["hints"] == {HOSTILE: [HOSTILE, "nan", "<class 'object'>", {"1": "b'\\xff'"}]}
    assert data["matches"][-1]["hints"] == {HOSTILE: HOSTILE}
    assert data["profile"]["workload"] == HOSTILE


def test_json_cannot_end_the_element_that_holds_it() -> None:
    text = json_in_html({"name": HOSTILE})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": HOSTILE}


def test_the_document_holds_the_graph() -> None:
    known = annotated()
    told = document_of(known)
    nodes = known.graph.nodes()
    assert [node["id"] for node in told["nodes"]] == [node.id for node in nodes]
    assert [tuple(node.get("shape", ())) for node in told["nodes"]] == [node.shape or () for node in nodes]
    weights = {value["name"]: value for value in told["values"] if value["residency"] == "persistent_weight"}
    assert weights["first.weight"]["shape"] == [8, 4]
    assert {"first", "ln_1", "last"} <= {node.get("module") for node in told["nodes"]}
    (norm,) = (match for match in told["matches"] if match["pattern"] == "norm")
    assert [told["nodes"][at]["module"] for at in norm["nodes"]] == ["ln_1"] * len(norm["nodes"])


def test_what_is_written_in_place_reaches_its_readers_through_the_writer() -> None:
    told = document_of(annotated())
    name = {at: node["operation"].partition("::")[2].partition(".")[0] for at, node in enumerate(told["nodes"])}
    flow = {(name[source], name[target]) for source, target, _ in told["edges"]}
    assert ("layer_norm", "relu_") in flow
    assert ("relu_", "linear") in flow
    assert ("layer_norm", "linear") not in flow


def test_a_graph_without_nodes_is_a_page_too(tmp_path: Path) -> None:
    known = annotated()
    empty = attrs.evolve(known, graph=RecordedGraph(()), nodes={}, patterns=())
    HtmlExporter().export(empty, tmp_path / "empty.html")
    data = json.loads(Elements((tmp_path / "empty.html").read_text(encoding="utf-8")).text_of("script", id="graph"))
    assert (data["nodes"], data["edges"]) == ([], [])


def test_two_exports_are_equal(tmp_path: Path) -> None:
    known = annotated()
    exporter = HtmlExporter()
    for name in ("a.html", "b.html"):
        exporter.export(known, tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
