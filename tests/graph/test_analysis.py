"""Putting together what plugins say of a graph, and finding the exporter that writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import networkx
import pytest

import djinn
from djinn.errors import AmbiguousPluginError, PluginError, PluginValidationError
from djinn.ir.phase import ExecutionPhase
from djinn.plugins import PluginSelection, Registered
from djinn_conformance.annotations import bare
from djinn_conformance.graphs import blocks
from djinn_plugins.graph import analysis
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.exporter.exporters import GraphmlExporter, JsonExporter
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.kinds import Annotations, PatternMatch
from djinn_plugins.graph.metadata import DataResidency, Evidence, MetadataPlaceholder, Tier, WorkloadProfile

GRAPH = blocks()[0]
FIRST, SECOND = (node.id for node in GRAPH.nodes()[:2])


@attrs.frozen
class Analyzer:
    name: str
    said: Annotations

    def annotate(self, graph: Graph, matches: Sequence[PatternMatch]) -> Annotations:
        assert [match.pattern for match in matches] == ["pair"]
        return self.said


class Pair:
    name = "pair"

    def find(self, graph: Graph) -> list[PatternMatch]:
        return [PatternMatch("pair", (FIRST, SECOND))]


class Installed:
    """Plugins as a session has them."""

    def __init__(self, selection: str = "", **objects: Sequence[Any]) -> None:
        self.selection = PluginSelection.parse(selection)
        self._objects = objects

    def registered(self, kind: str) -> dict[str, list[Registered]]:
        return {entry.name: [entry] for entry in self.find_all(kind)}

    def find_all(self, kind: str) -> list[Registered]:
        return [Registered(kind, value.name, f"acme-{kind}-{value.name}", "acme 1", value)
                for value in self._objects.get(kind, ())]

    def all(self, kind: str) -> list[Any]:
        return [entry.value for entry in self.find_all(kind)]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda **objects: monkeypatch.setattr(analysis, "_plugins", lambda: Installed(**objects))


def test_later_analyzers_are_believed_and_earlier_ones_kept(install: Callable[..., None]) -> None:
    early, late = Evidence(Tier.OPERATION), Evidence(Tier.STRUCTURE, 0.5)
    install(pattern=[Pair()], analyzer=[
        Analyzer("a", Annotations(
            {FIRST: {"flops": 3, "execution_phase": ExecutionPhase.FORWARD, "evidence": {"flops": early},
                     "workload_hints": {"fuse": True, "tile": 8}}},
            {"v0": DataResidency.INPUT, "v1": DataResidency.INPUT}, WorkloadProfile("a"), {Tier.OPERATION: 1.0})),
        Analyzer("b", Annotations(
            {FIRST: {"execution_phase": ExecutionPhase.BACKWARD, "evidence": {"execution_phase": late},
                     "workload_hints": {"tile": 16}}},
            {"v1": DataResidency.PERSISTENT_WEIGHT}, None, {Tier.OPERATION: 0.5, Tier.STRUCTURE: 2.0})),
    ])
    annotated = djinn.annotate_graph(GRAPH)
    known = annotated.nodes[FIRST]
    assert (known.flops, known.execution_phase) == (3, ExecutionPhase.BACKWARD)
    assert known.evidence == {"flops": early, "execution_phase": late}
    assert known.workload_hints == {"fuse": True, "tile": 16}
    assert annotated.values == {"v0": DataResidency.INPUT, "v1": DataResidency.PERSISTENT_WEIGHT}
    assert annotated.profile.workload == "a"
    assert annotated.seconds[Tier.OPERATION] == 1.5
    assert annotated.seconds[Tier.STRUCTURE] > 2.0, "what patterns took counts too"
    assert annotated.patterns == (PatternMatch("pair", (FIRST, SECOND)),)


def test_without_analyzers_it_is_known_what_nodes_say(install: Callable[..., None]) -> None:
    install(pattern=[Pair()])
    annotated = djinn.annotate_graph(GRAPH)
    assert list(annotated.nodes) == [node.id for node in GRAPH.nodes()]
    for node in GRAPH.nodes():
        known = annotated.nodes[node.id]
        dtype = None if node.dtype is None else str(node.dtype).removeprefix("torch.")
        assert (known.operation_type, known.tensor_shape, known.dtype) == (node.operation, node.shape, dtype)
        assert (known.module_path, known.call_index) == (None, None)
    assert annotated.profile == WorkloadProfile(nodes=len(GRAPH), patterns={"pair": 1})


def test_a_match_gives_its_operations_and_the_graph_between_them() -> None:
    (match,) = Pair().find(GRAPH)
    nodes = GRAPH.nodes()[:2]
    assert match.operations(GRAPH) == tuple(node.operation for node in nodes)
    part = match.subgraph(GRAPH)
    assert list(part) == [FIRST, SECOND]
    assert part.nodes[FIRST]["inputs"] == nodes[0].inputs
    assert part.number_of_edges() == sum({edge.source, edge.target} <= {FIRST, SECOND} for edge in GRAPH.edges())


@pytest.mark.parametrize(("said", "named"), [
    (Annotations({"n999": {"flops": 1}}), "n999"),
    (Annotations({FIRST: {"flop": 1}}), f"field flop of {FIRST}"),
])
def test_what_does_not_exist_is_put_down_to_the_analyzer(
    said: Annotations, named: str, install: Callable[..., None]
) -> None:
    install(pattern=[Pair()], analyzer=[Analyzer("odd", said)])
    with pytest.raises(PluginValidationError, match="'odd' of acme-analyzer-odd") as caught:
        djinn.annotate_graph(GRAPH)
    assert named in str(caught.value)


class Page:
    def __init__(self, name: str, suffix: str = ".json") -> None:
        self.name, self.suffix = name, suffix

    def export(self, annotated: AnnotatedGraph, path: Path) -> None:
        path.write_text(self.name)


def test_the_suffix_chooses_the_exporter(tmp_path: Path, install: Callable[..., None]) -> None:
    install(exporter=[JsonExporter(), GraphmlExporter(), Page("html", ".html")])
    annotated = bare(GRAPH)
    assert json.loads(annotated.export(tmp_path / "a.json").read_text()) == json.loads(json.dumps(annotated.to_dict()))
    read = networkx.read_graphml(annotated.export(str(tmp_path / "a.graphml")))
    assert list(read) == [node.id for node in GRAPH.nodes()]
    assert read.number_of_edges() == len(GRAPH.edges())
    for node in GRAPH.nodes():
        assert read.nodes[node.id]["operation"] == node.operation
        assert json.loads(read.nodes[node.id].get("inputs", "[]")) == list(node.inputs)
    assert annotated.to_html(tmp_path / "page").read_text() == "html"


def test_an_unknown_suffix_and_name_are_named_with_those_that_exist(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    install(exporter=[JsonExporter()])
    with pytest.raises(PluginError, match=r"writes a\.svg; there are 'json' \(\.json\)"):
        bare(GRAPH).export(tmp_path / "a.svg")
    with pytest.raises(PluginError, match=r"is called 'html'; there are 'json'"):
        bare(GRAPH).to_html(tmp_path / "a.html")
    install()
    with pytest.raises(PluginError, match="there are none"):
        bare(GRAPH).export(tmp_path / "a.json")


def test_two_exporters_of_one_suffix_are_told_apart_by_name(tmp_path: Path, install: Callable[..., None]) -> None:
    exporters = [Page("one", ".x"), Page("other", ".x"), Page("longer", ".y.x"), JsonExporter(), Page("mine")]
    install(exporter=exporters)
    with pytest.raises(AmbiguousPluginError, match="'one' of acme-exporter-one and 'other' of acme-exporter-other"):
        bare(GRAPH).export(tmp_path / "a.x")
    assert bare(GRAPH).export(tmp_path / "a.x", exporter="other").read_text() == "other"
    assert bare(GRAPH).export(tmp_path / "a.y.x").read_text() == "longer"
    assert bare(GRAPH).export(tmp_path / "a.json").read_text() != "mine", "without a choice, djinn's own is used"
    install(selection="exporter=mine", exporter=exporters)
    assert bare(GRAPH).export(tmp_path / "a.json").read_text() == "mine"
    assert bare(GRAPH).export(tmp_path / "a.y.x").read_text() == "longer"


def test_a_graph_is_annotated_without_a_session() -> None:
    djinn.shutdown()
    assert len(djinn.annotate_graph(GRAPH).nodes) == len(GRAPH)
    assert not djinn.is_initialized()


@pytest.fixture
def failing_once() -> MetadataPlaceholder:
    answers: Iterator[Any] = iter([ValueError("not yet"), "meaning"])

    def compute() -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return MetadataPlaceholder(compute)


def test_a_computation_that_raised_is_tried_again_by_the_next(failing_once: MetadataPlaceholder) -> None:
    with pytest.raises(ValueError, match="not yet"):
        failing_once.get()
    assert not failing_once.is_computed
    assert [failing_once.get(), failing_once.get()] == ["meaning", "meaning"]
    assert failing_once.is_computed
