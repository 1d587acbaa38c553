"""Annotated graphs as plain data: what is written can be read, and nothing else can."""

from __future__ import annotations

import copy
import json
from typing import Any

import attrs
import pytest
from hypothesis import given, settings

from djinn.errors import DocumentError
from djinn_conformance.annotations import annotated_graphs, bare
from djinn_conformance.graphs import EMPTY, blocks
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import Operand


def plain(annotated: AnnotatedGraph) -> Any:
    return json.loads(json.dumps(annotated.to_dict(), allow_nan=False))


@settings(max_examples=60, deadline=None)
@given(annotated=annotated_graphs())
def test_what_is_written_can_be_read(annotated: AnnotatedGraph) -> None:
    document = plain(annotated)
    again = AnnotatedGraph.from_dict(document)
    assert again.to_dict() == annotated.to_dict() == document
    assert repr(again.nodes) == repr(dict(annotated.nodes))
    assert repr(again.patterns) == repr(annotated.patterns)
    assert (again.values, again.profile, again.seconds) == (annotated.values, annotated.profile, annotated.seconds)
    assert list(again.graph.edges()) == list(annotated.graph.edges())


def test_equal_metadata_of_tensors_is_one_object_again() -> None:
    (again,) = (AnnotatedGraph.from_dict(plain(bare(blocks()[0]))) for _ in range(1))
    specs = [spec for node in again.graph.nodes() for spec in (*node.specs, *node.input_specs) if spec is not None]
    described = {(spec.size, spec.stride, spec.storage_offset, spec.dtype) for spec in specs}
    assert len({id(spec) for spec in specs}) == len(described) < len(specs)


def test_what_json_has_no_form_for_survives() -> None:
    graph = blocks()[0]
    odd = [Operand(0), float("-inf"), 1 + 2j, (1, (2,)), {"$tuple": [1]}, {"$$float": "1"}, [None, True], 2**80]
    node = attrs.evolve(graph.nodes()[0], keywords={"odd": odd})
    changed = type(graph)((node, *graph.nodes()[1:]), graph.storages)
    assert AnnotatedGraph.from_dict(plain(bare(changed))).graph.nodes()[0].keywords == {"odd": odd}


def test_every_attribute_reaches_networkx() -> None:
    annotated = bare(blocks()[1])
    made = annotated.to_networkx()
    assert list(made) == [node.id for node in annotated.graph.nodes()]
    for node in annotated.graph.nodes():
        wanted = {name: value for name, value in attrs.asdict(node, recurse=False).items() if name != "metadata"}
        wanted |= attrs.asdict(annotated.nodes[node.id], recurse=False)
        assert {**wanted, "patterns": ()} == made.nodes[node.id]
    assert made.number_of_edges() == len(annotated.graph.edges())


@pytest.mark.parametrize(("change", "said"), [
    (lambda d: d.update(version=2), "version 1"),
    (lambda d: d.pop("format"), "is no djinn.annotated_graph"),
    (lambda d: d["nodes"][0].pop("operation"), "$.nodes[0].operation"),
    (lambda d: d["nodes"][0]["specs"][0].update(dtype="load"), "$.nodes[0].specs[0]"),
    (lambda d: d["nodes"][0]["specs"][0].update(device="nowhere:x"), "@ $.nodes[0].specs[0]"),
    (lambda d: d["nodes"][0].update(arguments="three"), "$.nodes[0].arguments"),
    (lambda d: d["metadata"]["n0"].update(data_residency="smell"), "$.metadata['n0'].data_residency"),
    (lambda d: d["metadata"].pop("n1"), "n1 is no node, or has no metadata"),
    (lambda d: d.update(patterns=7), "$.patterns"),
])
def test_what_is_broken_is_refused_with_its_place(change: Any, said: str) -> None:
    document = copy.deepcopy(plain(bare(blocks()[0])))
    change(document)
    with pytest.raises(DocumentError) as caught:
        AnnotatedGraph.from_dict(document)
    assert said in str(caught.value)


@pytest.mark.parametrize("given", [None, [], "graph", 3, {}])
def test_what_is_no_document_is_refused(given: Any) -> None:
    with pytest.raises(DocumentError, match="is no djinn.annotated_graph"):
        AnnotatedGraph.from_dict(given)


def test_an_empty_graph_is_a_graph() -> None:
    assert len(AnnotatedGraph.from_dict(plain(bare(EMPTY))).graph.nodes()) == 0
