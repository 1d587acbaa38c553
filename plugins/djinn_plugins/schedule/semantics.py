"""Attaches annotations to a graph for schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from djinn_plugins.graph.annotated import AnnotatedGraph
from djinn_plugins.graph.graph import GraphNode, RecordedGraph, ValueInfo
from djinn_plugins.graph.links import NodeMetadata
from djinn_plugins.graph.metadata import DataResidency, SemanticMetadata

_KINDS = {
    DataResidency.PERSISTENT_WEIGHT: "parameter",
    DataResidency.STATEFUL_KV_CACHE: "cache",
    DataResidency.GRADIENT: "gradient",
    DataResidency.OPTIMIZER_STATE: "optimizer_state",
    DataResidency.INPUT: "input",
}
STAYING = frozenset(("parameter", "buffer", "optimizer_state", "cache"))
"""Kinds of values from outside that should stay where they are."""


def with_meaning(annotated: AnnotatedGraph) -> RecordedGraph:
    """Attach the annotations of nodes and values to the graph itself.

    Returns:
        The graph. Each node has its `SemanticMetadata` as ``metadata["meaning"]``, and values from outside without a
        known kind have a `ValueInfo.kind` derived from their residency.
    """
    graph = annotated.graph
    nodes = tuple(attrs.evolve(node, metadata=_metadata(node, annotated.nodes[node.id])) for node in graph.nodes())
    made = {value for node in nodes for value in node.outputs}
    values = dict(graph.values)
    for value in dict.fromkeys(value for node in nodes for value in node.inputs):
        info = values.get(value, ValueInfo())
        kind = _KINDS.get(annotated.values.get(value, DataResidency.UNKNOWN), "")
        if value not in made and kind and not info.kind:
            values[value] = attrs.evolve(info, kind=kind)
    return RecordedGraph(nodes, graph.storages, graph.backend_type, values, graph.fallback_reason,
                         getattr(graph, "returned", None))


def meaning_of(node: GraphNode) -> SemanticMetadata | None:
    """Return a node's annotation, if its graph was annotated."""
    metadata = node.metadata
    meaning = metadata.meaning if type(metadata) is NodeMetadata else metadata.get("meaning")
    return meaning if isinstance(meaning, SemanticMetadata) else None


def _metadata(node: GraphNode, meaning: SemanticMetadata) -> Mapping[str, Any]:
    if isinstance(node.metadata, NodeMetadata):
        return NodeMetadata(node.metadata.links, node.id, meaning)
    return {**node.metadata, "meaning": meaning}
