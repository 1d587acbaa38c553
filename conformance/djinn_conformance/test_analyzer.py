"""Laws of analyzers."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import given

from djinn_conformance.annotations import graphs_with_matches
from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.graphs import EMPTY, deep_graph, expect_unchanged, show, snapshot
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.graph.kinds import Analyzer, Annotations, PatternMatch
from djinn_plugins.graph.metadata import DataResidency, Evidence, SemanticMetadata, Tier

_LIMIT_S = 10.0
_FIELDS = {field.name for field in attrs.fields(SemanticMetadata)}
_COUNTS = ("flops", "bytes_read", "bytes_written", "layer_depth", "call_index")
Told = tuple[RecordedGraph, Sequence[PatternMatch]]


def _plain(annotations: Annotations) -> list[Any]:
    """Return everything except the times."""
    return [{node: dict(found) for node, found in annotations.nodes.items()}, dict(annotations.values),
            annotations.profile]


@law("analyzer.known_nodes", effort=0.4)
@given(told=graphs_with_matches())
def test_known_nodes(subject: Subject, plugin: Analyzer, told: Told) -> None:
    """Look up the annotated nodes and values."""
    graph, matches = told
    nodes = {node.id for node in graph.nodes()}
    values = {value for node in graph.nodes() for value in (*node.inputs, *node.outputs)} | set(graph.values)
    found, where = plugin.annotate(graph, matches), f"{subject}: {show(graph)}; {matches}"
    expect_equal(sorted(set(found.nodes) - nodes), [], "annotated nodes that are not in the graph", where)
    expect_equal(sorted(set(found.values) - values), [], "annotated values that are not in the graph", where)


@law("analyzer.well_formed", effort=0.4)
@given(told=graphs_with_matches())
def test_well_formed(subject: Subject, plugin: Analyzer, told: Told) -> None:
    """Check the annotations."""
    graph, matches = told
    found, where = plugin.annotate(graph, matches), f"{subject}: {show(graph)}; {matches}"
    for node, said in found.nodes.items():
        expect_equal(sorted(set(said) - _FIELDS), [], f"fields of {node} that do not exist", where)
        for name in _COUNTS:
            expect((said.get(name) or 0) >= 0, f"{name} of {node}", got=said.get(name), wanted="0 or more", where=where)
        for name, evidence in said.get("evidence", {}).items():
            sure = isinstance(evidence, Evidence) and evidence.tier in Tier and 0 <= evidence.confidence <= 1
            expect(sure, f"evidence for {name} of {node}", got=evidence, wanted="a tier, and between 0 and 1",
                   where=where)
    for value, residency in found.values.items():
        expect(isinstance(residency, DataResidency), f"residency of {value}", got=residency, wanted="a DataResidency",
               where=where)
    expect(all(took >= 0 for took in found.seconds.values()), "times", got=found.seconds, wanted="0 or more",
           where=where)


@law("analyzer.deterministic", effort=0.4)
@given(told=graphs_with_matches())
def test_deterministic(subject: Subject, plugin: Analyzer, told: Told) -> None:
    """Annotate twice, with another graph in between."""
    graph, matches = told
    first = _plain(plugin.annotate(graph, matches))
    plugin.annotate(EMPTY, ())
    expect_equal(_plain(plugin.annotate(graph, matches)), first, "second annotation", f"{subject}: {show(graph)}")


@law("analyzer.graph_unchanged", effort=0.4)
@given(told=graphs_with_matches())
def test_graph_unchanged(subject: Subject, plugin: Analyzer, told: Told) -> None:
    """Compare graph and matches with copies made before."""
    graph, matches = told
    before, copied = snapshot(graph), copy.deepcopy(matches)
    plugin.annotate(graph, matches)
    expect_unchanged(graph, before, f"{subject}: {show(graph)}")
    expect_equal(repr(matches), repr(copied), "matches afterwards", f"{subject}: {show(graph)}")


@law("analyzer.deep_graph")
def test_deep_graph(subject: Subject, plugin: Analyzer) -> None:
    """Annotate nothing, then a long chain."""
    nothing = plugin.annotate(EMPTY, ())
    expect_equal([dict(nothing.nodes), dict(nothing.values)], [{}, {}], "annotations", f"{subject}: no nodes")
    graph = deep_graph()
    graph.edges()
    started = time.process_time()
    plugin.annotate(graph, ())
    took_s = time.process_time() - started
    expect(took_s < _LIMIT_S, "processor time", got=f"{took_s:.1f} s", wanted=f"less than {_LIMIT_S} s",
           where=f"{subject}: a chain of {len(graph)} nodes")
