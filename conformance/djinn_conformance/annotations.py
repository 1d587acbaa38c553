"""Strategies for annotated graphs: pattern matches, and annotations of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from djinn.ir.phase import ExecutionPhase
from djinn_conformance.graphs import graphs
from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import RecordedGraph, node_of
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.metadata import (
    DataLineage,
    DataResidency,
    Evidence,
    MemoryPattern,
    Modality,
    SemanticMetadata,
    Tier,
    WorkloadProfile,
)

__all__ = ("annotated_graphs", "bare", "graphs_with_matches", "matches_in")

_NAMES = ("attention", "kv_cache", "mlp", "norm", "embedding", "head", "llm", "something")
_TEXT = st.text(max_size=12) | st.sampled_from(['<a href="x">&amp;', "</script>", "]]>", "\x00\x1b", "layer.0"])
_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=6)
_HINTS = st.dictionaries(_TEXT, _PLAIN, max_size=3)
_SHARES = st.floats(0, 1)
_COUNTS = st.integers(0, 2**70)


@st.composite
def matches_in(draw: st.DrawFn, graph: RecordedGraph) -> list[PatternMatch]:
    """Draw matches of a graph's nodes, for well-known patterns and for others."""
    nodes = [node.id for node in graph.nodes()]
    found = []
    for _ in range(draw(st.integers(0, 4)) if nodes else 0):
        begin = draw(st.integers(0, len(nodes) - 1))
        held = nodes[begin : begin + draw(st.integers(1, 8))]
        values = [value for node in held for value in node_of(graph, node).outputs]
        found.append(PatternMatch(
            draw(st.sampled_from(_NAMES)), tuple(held), draw(_SHARES), draw(_HINTS),
            {node: draw(_TEXT) for node in held[:2]}, {"result": values[-1]} if values else {}, draw(_HINTS)))
    return found


@st.composite
def graphs_with_matches(draw: st.DrawFn) -> tuple[RecordedGraph, list[PatternMatch]]:
    """Draw a graph and matches in it."""
    graph = draw(graphs())
    return graph, draw(matches_in(graph))


def _metadata(operation: str) -> st.SearchStrategy[SemanticMetadata]:
    return st.builds(
        SemanticMetadata, st.just(operation), tensor_shape=st.none() | st.tuples(st.integers(0, 9)),
        dtype=st.none() | st.just("float32"), module_path=st.none() | _TEXT, model_module=st.none() | _TEXT,
        layer_depth=st.none() | _COUNTS, call_index=st.none() | _COUNTS, semantic_role=st.none() | _TEXT,
        execution_phase=st.sampled_from(ExecutionPhase), data_residency=st.sampled_from(DataResidency),
        memory_pattern=st.sampled_from(MemoryPattern), modality=st.sampled_from(Modality),
        data_lineage=st.builds(DataLineage, st.tuples(_TEXT), st.tuples(_TEXT), _TEXT), flops=_COUNTS,
        bytes_read=_COUNTS, workload_hints=_HINTS,
        evidence=st.just({"priority": Evidence(Tier.STRUCTURE, 0.5)}))


@st.composite
def annotated_graphs(draw: st.DrawFn) -> AnnotatedGraph:
    """Draw a graph with annotations of every kind, whether they make sense or not."""
    graph, matches = draw(graphs_with_matches())
    kinds = draw(st.lists(_metadata("aten::add.Tensor"), min_size=1, max_size=3))
    nodes = {node.id: attrs.evolve(kinds[place % len(kinds)], operation_type=node.operation)
             for place, node in enumerate(graph.nodes())}
    residencies = draw(st.lists(st.sampled_from(DataResidency), min_size=1, max_size=4))
    names = dict.fromkeys(value for node in graph.nodes() for value in (*node.inputs, *node.outputs))
    values = {value: residencies[place % len(residencies)] for place, value in enumerate(names)}
    profile = WorkloadProfile(draw(_TEXT), dict.fromkeys(ExecutionPhase, 1), nodes=len(nodes),
                              flops=draw(_COUNTS), steps=(ExecutionPhase.LLM_PREFILL, ExecutionPhase.LLM_DECODE))
    return AnnotatedGraph(graph, nodes, values, tuple(matches), profile, {Tier.RUNTIME: 0.25})


def bare(graph: RecordedGraph, matches: Sequence[PatternMatch] = ()) -> AnnotatedGraph:
    """Give a graph the smallest possible annotations."""
    nodes: dict[str, Any] = {node.id: SemanticMetadata(node.operation) for node in graph.nodes()}
    return AnnotatedGraph(graph, nodes, {}, tuple(matches), WorkloadProfile(nodes=len(nodes)))
