"""Graphs: a read-only view of recorded operations for analysis and scheduling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.links import ValueId
from djinn_plugins.graph.operation import operation_name
from djinn_plugins.graph.returned import Returned

if TYPE_CHECKING:
    import networkx


@attrs.frozen
class Operand:
    """Represents a tensor among the arguments of a node."""

    position: int
    """Position among the node's ``inputs``."""


@attrs.frozen
class Origin:
    """The circumstances in which a node was recorded; all empty if it was not watched."""

    module_path: str = ""
    """The innermost module of the captured model that was running, for example ``transformer.h.0.attn``."""
    module_type: str = ""
    """Its class."""
    call_index: int = -1
    """Which call of the captured model it was, from 0."""
    stage: str = ""
    """``forward``, ``backward`` or ``optimizer``."""
    line: str = ""
    """The line of user code, in debug mode."""


@attrs.frozen
class GraphNode:
    """One operation of a graph."""

    id: str
    """Identifier within the graph."""
    operation: str = attrs.field(converter=operation_name)
    """Qualified overload, ``namespace::name.overload``, as an `djinn_plugins.graph.operation.OperationName`: it also
    equals ``namespace::name``.
    """
    inputs: tuple[str, ...]
    """Identifiers of the values it reads, in order of its arguments. In a recorded graph, each is a
    `djinn_plugins.graph.links.ValueId` and also has the ``id``, ``operation``, ``inputs`` and ``metadata`` of the node
    that makes the value.
    """
    outputs: tuple[str, ...]
    """Identifiers of the values it produces. In a recorded graph, each also lists the nodes that read it:
    ``node.outputs[0].readers``.
    """
    specs: tuple[TensorSpec | None, ...]
    """Metadata of the outputs."""
    writes: tuple[str, ...] = ()
    """Identifiers of the inputs it changes in place."""
    is_random: bool = False
    """Whether it draws random numbers."""
    input_specs: tuple[TensorSpec | None, ...] = ()
    """Metadata of the inputs when it was recorded; ``None`` for inputs that are not tensors."""
    arguments: tuple[Any, ...] = ()
    """Positional arguments as given, with tensors replaced by `Operand`, also in nested lists."""
    keywords: Mapping[str, Any] = attrs.field(factory=dict)
    """Keyword arguments, likewise."""
    origin: Origin = Origin()
    """Where it was recorded."""
    metadata: Mapping[str, Any] = attrs.field(factory=dict, eq=False)
    """Annotations. Those of a recorded graph are computed on first use; see
    `djinn_plugins.graph.links.NodeMetadata`."""

    @property
    def predecessors(self) -> tuple[GraphNode, ...]:
        """The nodes whose results it reads; empty in a graph that was not recorded."""
        found = [value.producer for value in self.inputs if isinstance(value, ValueId)]
        return tuple({node.id: node for node in found if node is not None}.values())

    @property
    def successors(self) -> tuple[GraphNode, ...]:
        """The nodes that read its results; empty in a graph that was not recorded."""
        found = [node for value in self.outputs if isinstance(value, ValueId) for node in value.readers]
        return tuple({node.id: node for node in found}.values())

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Size of the first output, if there is one."""
        spec = self.specs[0] if self.specs else None
        return None if spec is None else tuple(spec.size)

    @property
    def dtype(self) -> Any:
        """Dtype of the first output, if there is one."""
        spec = self.specs[0] if self.specs else None
        return None if spec is None else spec.dtype


@attrs.frozen
class ValueInfo:
    """Information on a value in addition to the node that produces it."""

    name: str = ""
    """Name in the captured model, for example ``transformer.wte.weight``."""
    kind: str = ""
    """``parameter``, ``buffer``, ``optimizer_state``, ``cache``, ``gradient`` or ``input``; empty if unknown."""
    spec: TensorSpec | None = None


@attrs.frozen
class Edge:
    """``target`` must come after ``source``."""

    source: str
    target: str
    value: str
    """The value that connects them; empty for the order of random draws."""
    kind: str
    """``data``, or ``hazard`` if only the order of reads and writes connects them."""


class Nodes(tuple[GraphNode, ...]):
    """The nodes of a graph: ``graph.nodes`` and ``graph.nodes()`` are the same, as in networkx."""

    __slots__ = ()

    def __call__(self) -> Nodes:
        """Return the nodes."""
        return self


@runtime_checkable
class Graph(Protocol):
    """The interface that analyzers, patterns and schedulers read."""

    @property
    def backend_type(self) -> str:
        """Origin of the graph: ``lazy_dag`` or ``fx``."""

    @property
    def fallback_reason(self) -> str:
        """Why the graph does not come from its usual origin; empty if it does."""

    @property
    def storages(self) -> Mapping[str, str]:
        """For each value that is a view: the value whose storage it shares."""

    @property
    def values(self) -> Mapping[str, ValueInfo]:
        """Information on values from outside, by identifier."""

    def nodes(self) -> Sequence[GraphNode]:
        """List the nodes in program order."""

    def edges(self) -> Sequence[Edge]:
        """List the dependencies, including hazards."""

    def topological_sort(self) -> Sequence[GraphNode]:
        """List the nodes in an order that respects every edge."""

    def get_node(self, node_id: str) -> GraphNode | None:
        """Look up a node; ``None`` if there is none of that identifier."""


def node_of(graph: Graph, node_id: str) -> GraphNode:
    """Look up a node that exists.

    Raises:
        KeyError: There is no such node.
    """
    found = graph.get_node(node_id)
    if found is None:
        raise KeyError(node_id)
    return found


@attrs.frozen(eq=False, slots=False)
class RecordedGraph:
    """A graph of recorded nodes. Program order is a topological order by construction."""

    _nodes: Nodes = attrs.field(converter=Nodes)
    storages: Mapping[str, str] = attrs.field(factory=dict)
    """For each value that is a view: the value whose storage it shares."""
    backend_type: str = "lazy_dag"
    values: Mapping[str, ValueInfo] = attrs.field(factory=dict)
    """Information on values from outside, by identifier."""
    fallback_reason: str = ""
    returned: Returned | None = attrs.field(default=None, repr=False)
    """What the model returned whose call it is; ``None`` if it is not one call of a model."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[GraphNode]:
        return iter(self._nodes)

    @property
    def nodes(self) -> Nodes:
        """The nodes in program order; it can be called, too."""
        return self._nodes

    def edges(self) -> tuple[Edge, ...]:
        """List the dependencies, including hazards."""
        return self._edges

    def topological_sort(self) -> tuple[GraphNode, ...]:
        """List the nodes in an order that respects every edge."""
        return self._nodes

    def get_node(self, node_id: str) -> GraphNode | None:
        """Look up a node; ``None`` if there is none of that identifier."""
        return self._by_id.get(node_id)

    get_node_by_id = get_node

    def __getitem__(self, node_id: str) -> GraphNode:
        """Look up a node.

        Raises:
            KeyError: There is no such node.
        """
        return self._by_id[node_id]

    @cached_property
    def _by_id(self) -> dict[str, GraphNode]:
        return {node.id: node for node in self._nodes}

    @cached_property
    def _edges(self) -> tuple[Edge, ...]:
        return tuple(_edges_of(self._nodes, self.storages))

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """Convert to a networkx graph; fields of nodes and edges become attributes."""
        return to_networkx(self)


def to_networkx(graph: Graph, nodes: Iterable[str] | None = None) -> networkx.MultiDiGraph[str]:
    """Convert a graph, or some of its nodes with the edges between them, to a networkx graph.

    Fields of nodes and edges become attributes.
    """
    import networkx

    wanted = None if nodes is None else set(nodes)
    made: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    for node in graph.nodes():
        if wanted is None or node.id in wanted:
            made.add_node(node.id, **attrs.asdict(node, recurse=False))
    for edge in graph.edges():
        if edge.source in made and edge.target in made:
            made.add_edge(edge.source, edge.target, value=edge.value, kind=edge.kind)
    return made


_RANDOM = ""


def _edges_of(nodes: Sequence[GraphNode], storages: Mapping[str, str]) -> Iterator[Edge]:
    """Derive data edges from values, and hazard edges from the order of reads and writes of each storage."""
    producer: dict[str, str] = {}
    writer: dict[str, str] = {}
    readers: dict[str, list[str]] = {}
    for node in nodes:
        linked: set[str] = set()
        for value in dict.fromkeys(node.inputs):
            source = producer.get(value)
            if source is not None:
                linked.add(source)
                yield Edge(source, node.id, value, "data")
        read = [storages.get(value, value) for value in node.inputs]
        written = {storages.get(value, value) for value in node.writes}
        if node.is_random:
            read.append(_RANDOM)
            written.add(_RANDOM)
        for storage in dict.fromkeys(read):
            before = [writer[storage]] if storage in writer else []
            if storage in written:
                before += readers.get(storage, [])
            for source in dict.fromkeys(before):
                if source != node.id and source not in linked:
                    linked.add(source)
                    yield Edge(source, node.id, storage, "hazard")
            if storage in written:
                writer[storage] = node.id
                readers[storage] = []
            else:
                readers.setdefault(storage, []).append(node.id)
        for value in node.outputs:
            producer[value] = node.id
