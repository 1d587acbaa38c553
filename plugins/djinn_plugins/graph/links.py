"""Ways from a node of a graph to its neighbours and to its annotations, which are computed on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from djinn_plugins.graph.annotated import AnnotatedGraph
    from djinn_plugins.graph.graph import GraphNode, RecordedGraph
    from djinn_plugins.graph.metadata import SemanticMetadata

__all__ = ("GraphLinks", "NodeMetadata", "ValueId", "links_of")

_PHASE = "phase"
"""The key under which earlier documents look for ``execution_phase``."""


class GraphLinks:
    """Which node makes each value of a graph, which nodes read it, and the annotations of the nodes.

    Attributes:
        graph: The graph, as soon as it exists.
        annotate: Returns the annotated graph.
    """

    def __init__(self) -> None:
        self.graph: RecordedGraph | None = None
        self.annotate = self._annotated
        self._local = threading.local()

    @cached_property
    def producers(self) -> Mapping[str, GraphNode]:
        """The node that makes each value."""
        return {value: node for node in self.graph or () for value in node.outputs}

    @cached_property
    def readers(self) -> Mapping[str, tuple[GraphNode, ...]]:
        """The nodes that read each value, in program order."""
        found: dict[str, list[GraphNode]] = {}
        for node in self.graph or ():
            for value in dict.fromkeys(node.inputs):
                found.setdefault(value, []).append(node)
        return {value: tuple(nodes) for value, nodes in found.items()}

    def meaning_of(self, node_id: str) -> SemanticMetadata | None:
        """Return a node's annotation; ``None`` while the annotations are being computed."""
        if self.graph is None or getattr(self._local, "is_computing", False):
            return None
        self._local.is_computing = True
        try:
            return self.annotate().nodes[node_id]
        finally:
            self._local.is_computing = False

    @cached_property
    def _computed(self) -> AnnotatedGraph:
        from djinn_plugins.graph.analysis import annotate_graph

        assert self.graph is not None, "asked only of graphs that exist"
        return annotate_graph(self.graph)

    def _annotated(self) -> AnnotatedGraph:
        return self._computed


class ValueId(str):
    """Identifier of a value. It also stands for the node that makes the value.

    For a value from outside the graph, ``id`` is the identifier of the value, and ``operation`` is ``placeholder``.
    """

    __slots__ = ("_links",)
    _links: GraphLinks

    @classmethod
    def linked(cls, text: str, links: GraphLinks) -> ValueId:
        """Create an identifier of a value of a graph."""
        made = cls(text)
        made._links = links
        return made

    @property
    def producer(self) -> GraphNode | None:
        """The node that makes the value; ``None`` for a value from outside."""
        return self._links.producers.get(self)

    @property
    def readers(self) -> tuple[GraphNode, ...]:
        """The nodes that read the value."""
        return self._links.readers.get(self, ())

    @property
    def id(self) -> str:
        """Identifier of the node that makes it."""
        node = self.producer
        return str(self) if node is None else node.id

    @property
    def operation(self) -> str:
        """Operation of that node."""
        node = self.producer
        return "placeholder" if node is None else node.operation

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of that node."""
        node = self.producer
        return () if node is None else node.inputs

    @property
    def outputs(self) -> tuple[GraphNode, ...]:
        """The nodes that read the value, under the name of earlier documents."""
        return self.readers

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Annotations of that node."""
        node = self.producer
        return {} if node is None else node.metadata

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a node does not copy the whole graph.
        return str, (str(self),)


class NodeMetadata(Mapping[str, Any]):
    """Annotations of one node by field name, and the phase as ``phase``. Computed on first use.

    Fields without a value, such as the phase of a node that has none, are missing.

    Args:
        links: The graph's.
        node_id: The node.
        meaning: The annotation, if it is known; it is then also the value of ``meaning``.
    """

    __slots__ = ("_links", "_node_id", "meaning")

    def __init__(self, links: GraphLinks | None, node_id: str, meaning: SemanticMetadata | None = None) -> None:
        self._links, self._node_id, self.meaning = links, node_id, meaning

    @property
    def links(self) -> GraphLinks | None:
        """The graph's ways; ``None`` for a graph that was not recorded."""
        return self._links

    def _fields(self) -> dict[str, Any]:
        found = self.meaning or (self._links.meaning_of(self._node_id) if self._links else None)
        if found is None:
            return {}
        fields = {field.name: value for field in attrs.fields(type(found))
                  if (value := getattr(found, field.name)) is not None and value != "unknown"}
        if "execution_phase" in fields:
            fields[_PHASE] = fields["execution_phase"]
        if self.meaning is not None:
            fields["meaning"] = self.meaning
        return fields

    def __getitem__(self, name: str) -> Any:
        if name == "meaning":
            # Asked of every node by schedulers, which must not start an analysis.
            if self.meaning is None:
                raise KeyError(name)
            return self.meaning
        return self._fields()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._fields())

    def __repr__(self) -> str:
        # Showing a node does not analyze its graph.
        return f"<annotations of {self._node_id}>" if self.meaning is None else repr(self.meaning)

    def __reduce__(self) -> tuple[Any, ...]:
        return NodeMetadata, (None, self._node_id, self.meaning)


def links_of(node: GraphNode) -> GraphLinks:
    """Return the ways of a recorded node's graph."""
    links = node.metadata.links if isinstance(node.metadata, NodeMetadata) else None
    return links or GraphLinks()
