"""Laws of analyzers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hypothesis import given

from djinn.kinds import Analyzer
from djinn.model.graph import RecordedGraph
from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.graphs import EMPTY, deep_graph, expect_unchanged, graphs, show, snapshot
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject

_LIMIT_S = 10.0


def _plain(annotations: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {node: dict(found) for node, found in annotations.items()}


@law("analyzer.known_nodes", effort=0.4)
@given(graph=graphs())
def test_known_nodes(subject: Subject, plugin: Analyzer, graph: RecordedGraph) -> None:
    """Look the annotated nodes up."""
    known, where = {node.id for node in graph.nodes()}, f"{subject}: {show(graph)}"
    annotations: Mapping[str, Any] = plugin.annotate(graph)
    for node, found in annotations.items():
        expect(node in known, "annotated node", got=node, wanted="a node of the graph", where=where)
        names: object = list(found) if isinstance(found, Mapping) else None
        expect(isinstance(names, list) and all(isinstance(name, str) for name in names), f"annotation of {node}",
               got=found, wanted="a mapping from names", where=where)


@law("analyzer.deterministic", effort=0.4)
@given(graph=graphs())
def test_deterministic(subject: Subject, plugin: Analyzer, graph: RecordedGraph) -> None:
    """Annotate twice, with another graph in between."""
    first = _plain(plugin.annotate(graph))
    plugin.annotate(EMPTY)
    expect_equal(_plain(plugin.annotate(graph)), first, "second annotation", f"{subject}: {show(graph)}")


@law("analyzer.graph_unchanged", effort=0.4)
@given(graph=graphs())
def test_graph_unchanged(subject: Subject, plugin: Analyzer, graph: RecordedGraph) -> None:
    """Compare the graph with a copy made before."""
    before = snapshot(graph)
    plugin.annotate(graph)
    expect_unchanged(graph, before, f"{subject}: {show(graph)}")


@law("analyzer.deep_graph")
def test_deep_graph(subject: Subject, plugin: Analyzer) -> None:
    """Annotate nothing, then a long chain."""
    expect_equal(_plain(plugin.annotate(EMPTY)), {}, "annotations", f"{subject}: no nodes")
    graph = deep_graph()
    graph.edges()
    started = time.monotonic()
    plugin.annotate(graph)
    took_s = time.monotonic() - started
    expect(took_s < _LIMIT_S, "time", got=f"{took_s:.1f} s", wanted=f"less than {_LIMIT_S} s",
           where=f"{subject}: a chain of {len(graph)} nodes")
