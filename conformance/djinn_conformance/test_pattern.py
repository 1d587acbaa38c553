"""Laws of patterns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import given

from djinn_conformance.assertions import expect, expect_equal
from djinn_conformance.graphs import EMPTY, deep_graph, expect_unchanged, graphs, renamed, show, snapshot
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.graph.kinds import Pattern, PatternMatch

_LIMIT_S = 10.0


def _plain(matches: Sequence[PatternMatch]) -> list[dict[str, Any]]:
    return [attrs.asdict(match) for match in matches]


@law("pattern.known_nodes")
@given(graph=graphs())
def test_known_nodes(subject: Subject, plugin: Pattern, graph: RecordedGraph) -> None:
    """Look up the matches' nodes."""
    position = {node.id: index for index, node in enumerate(graph.topological_sort())}
    for match in plugin.find(graph):
        where = f"{subject}: {show(graph)}"
        expect(bool(match.nodes) and set(match.nodes) <= set(position), "nodes of a match", got=match.nodes,
               wanted="one or more nodes of the graph", where=where)
        order = [position[node] for node in match.nodes]
        expect(order == sorted(set(order)), "nodes of a match", got=match.nodes,
               wanted="each once, in topological order", where=where)


@law("pattern.well_formed")
@given(graph=graphs())
def test_well_formed(subject: Subject, plugin: Pattern, graph: RecordedGraph) -> None:
    """Check names, confidences and repetitions."""
    matches, where = plugin.find(graph), f"{subject}: {show(graph)}"
    for match in matches:
        expect_equal(match.pattern, plugin.name, "pattern of a match", where)
        expect(0 <= match.confidence <= 1, "confidence", got=match.confidence, wanted="between 0 and 1", where=where)
    nodes = [match.nodes for match in matches]
    expect_equal(len(set(nodes)), len(nodes), "number of different matches", where)


@law("pattern.deterministic", effort=0.4)
@given(graph=graphs())
def test_deterministic(subject: Subject, plugin: Pattern, graph: RecordedGraph) -> None:
    """Search twice, with another graph in between."""
    first = _plain(plugin.find(graph))
    plugin.find(EMPTY)
    expect_equal(_plain(plugin.find(graph)), first, "second search", f"{subject}: {show(graph)}")


@law("pattern.renumbering", effort=0.4)
@given(graph=graphs())
def test_renumbering(subject: Subject, plugin: Pattern, graph: RecordedGraph) -> None:
    """Search the same graph under other names."""
    other, names = renamed(graph)
    wanted = [(tuple(names[node] for node in match.nodes), match.confidence) for match in plugin.find(graph)]
    got = [(tuple(match.nodes), match.confidence) for match in plugin.find(other)]
    expect_equal(sorted(got), sorted(wanted), "matches under other names", f"{subject}: {show(graph)}")


@law("pattern.graph_unchanged", effort=0.4)
@given(graph=graphs())
def test_graph_unchanged(subject: Subject, plugin: Pattern, graph: RecordedGraph) -> None:
    """Compare the graph with a copy made before."""
    before = snapshot(graph)
    plugin.find(graph)
    expect_unchanged(graph, before, f"{subject}: {show(graph)}")


@law("pattern.disjoint", effort=0.4)
@given(graph=graphs())
def test_disjoint(subject: Subject, plugin: Pattern, graph: RecordedGraph) -> None:
    """Look for nodes in two matches."""
    nodes = [node for match in plugin.find(graph) for node in dict.fromkeys(match.nodes)]
    twice = sorted({node for node in nodes if nodes.count(node) > 1})
    expect_equal(twice, [], "nodes in two matches", f"{subject}: {show(graph)}")


@law("pattern.deep_graph")
def test_deep_graph(subject: Subject, plugin: Pattern) -> None:
    """Search nothing, then a long chain."""
    expect_equal(list(plugin.find(EMPTY)), [], "matches", f"{subject}: no nodes")
    graph = deep_graph()
    graph.edges()
    started = time.process_time()
    plugin.find(graph)
    took_s = time.process_time() - started
    expect(took_s < _LIMIT_S, "processor time", got=f"{took_s:.1f} s", wanted=f"less than {_LIMIT_S} s",
           where=f"{subject}: a chain of {len(graph)} nodes")
