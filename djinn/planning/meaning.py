"""Graphs whose nodes carry what they mean."""

from __future__ import annotations

import attrs

from djinn.model.annotated import AnnotatedGraph
from djinn.model.graph import GraphNode, RecordedGraph
from djinn.model.metadata import SemanticMetadata

MEANING = "meaning"
"""Where `djinn.model.graph.GraphNode.metadata` keeps the node's `SemanticMetadata`."""


def with_meaning(annotated: AnnotatedGraph) -> RecordedGraph:
    """Return the graph with each node's meaning among its metadata."""
    graph = annotated.graph
    nodes = tuple(attrs.evolve(node, metadata={**node.metadata, MEANING: annotated.nodes[node.id]})
                  for node in graph.nodes())
    return RecordedGraph(nodes, graph.storages, graph.backend_type, graph.values, graph.fallback_reason)


def meaning_of(node: GraphNode) -> SemanticMetadata | None:
    """Return what a node means, if that is known."""
    found = node.metadata.get(MEANING)
    return found if isinstance(found, SemanticMetadata) else None
