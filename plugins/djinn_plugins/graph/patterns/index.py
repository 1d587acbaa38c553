"""An index of a graph that all patterns share: the producer, writers and readers of each value.

It is built once for each graph and kept for the graph's lifetime. Each query takes constant time, or time that grows
with the distance searched, so a search from anchors is linear in the size of the graph.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.graph import Graph, GraphNode, Operand
from djinn_plugins.graph.kinds import PatternMatch
from djinn_plugins.graph.patterns.operators import CASTS, FACTORIES, LINEAR_OPERANDS, PARTS, SAME, VIEWS, short_name

__all__ = ("Index", "index_of")

_Found = TypeVar("_Found")
_END = 1 << 62
_WEIGHT_STEPS = 8


class Index:
    """Producers, writers and readers of values; nodes are identified by their position in program order.

    Attributes:
        nodes: The graph's nodes.
        names: Short name of each node's operator.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes: Sequence[GraphNode] = tuple(graph.topological_sort())
        self.names = [short_name(node.operation) for node in self.nodes]
        self._storages = graph.storages
        self._producers: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}
        self._writers: dict[str, list[int]] = {}
        self._specs: dict[str, TensorSpec | None] = {}
        self._known: dict[Any, Any] = {}
        for position, node in enumerate(self.nodes):
            for value in node.inputs:
                readers = self._readers.setdefault(value, [])
                if not readers or readers[-1] != position:
                    readers.append(position)
            for value in node.outputs:
                self._producers[value] = position
            for value in node.writes:
                self._writers.setdefault(self.storage(value), []).append(position)

    def once(self, search: Callable[[Index], _Found]) -> _Found:
        """Return the result of ``search`` for this index; it is computed only once."""
        if search not in self._known:
            self._known[search] = search(self)
        found: _Found = self._known[search]
        return found

    def storage(self, value: str) -> str:
        """Return the value whose storage this one shares."""
        return self._storages.get(value, value)

    def producer(self, value: str) -> int:
        """Return the node whose output this is; -1 if it comes from outside."""
        return self._producers.get(value, -1)

    def readers(self, value: str) -> Sequence[int]:
        """List the nodes that have this value among their operands."""
        return self._readers.get(value, ())

    def source(self, value: str, before: int = _END) -> int:
        """Return the node that set a value as seen by a reader at ``before``: its producer, or its last writer."""
        position = self._producers.get(value, -1)
        writers = self._writers.get(self._storages.get(value, value)) if self._writers else None
        if writers:
            last = bisect_left(writers, before) - 1
            if last >= 0 and writers[last] > position:
                return writers[last]
        return position

    def result(self, position: int) -> str | None:
        """Return the value that a node makes, or writes in place."""
        node = self.nodes[position]
        return node.outputs[0] if node.outputs else node.writes[0] if node.writes else None

    def uses(self, position: int) -> Iterator[int]:
        """List the readers of a node's results, up to the next node that writes them in place."""
        node = self.nodes[position]
        for value in node.outputs or node.writes:
            for reader in self._readers.get(value, ()):
                if reader > position:
                    yield reader
                    if value in self.nodes[reader].writes:
                        break

    def spec(self, value: str) -> TensorSpec | None:
        """Return the metadata of a value, from the node that makes it or from one that reads it."""
        if value not in self._specs:
            self._specs[value] = self._find_spec(value)
        return self._specs[value]

    def _find_spec(self, value: str) -> TensorSpec | None:
        position = self._producers.get(value, -1)
        if position >= 0:
            node = self.nodes[position]
            found = node.specs[node.outputs.index(value)] if len(node.specs) == len(node.outputs) else None
            if found is not None:
                return found
        for reader in self._readers.get(value, ()):
            node = self.nodes[reader]
            if len(node.input_specs) == len(node.inputs):
                return node.input_specs[node.inputs.index(value)]
        return None

    def size(self, value: str) -> tuple[int, ...] | None:
        """Return the size of a value, if it is known."""
        spec = self.spec(value)
        return None if spec is None else tuple(spec.size)

    def operand(self, position: int, place: int) -> str | None:
        """Return an operand of a node by its place among the operands, from the end if negative."""
        inputs = self.nodes[position].inputs
        return inputs[place] if -len(inputs) <= place < len(inputs) else None

    def argument(self, position: int, place: int, name: str = "", default: Any = None) -> Any:
        """Return an argument that is not a tensor, by place or by name, if the graph contains it."""
        node = self.nodes[position]
        found = node.arguments[place] if 0 <= place < len(node.arguments) else node.keywords.get(name, default)
        return default if isinstance(found, Operand) or found is None else found

    def tensor(self, position: int, place: int, name: str = "") -> str | None:
        """Return the value of a tensor argument, by place or by name, if the graph contains it."""
        node = self.nodes[position]
        found = node.arguments[place] if 0 <= place < len(node.arguments) else node.keywords.get(name)
        return node.inputs[found.position] if isinstance(found, Operand) else None

    def upstream(self, value: str, before: int = _END, through: Container[str] = SAME) -> tuple[str, int]:
        """Go back through such operators with single operands; return the value found, and the node that read it."""
        while True:
            position = self.source(value, before)
            if position < 0 or self.names[position] not in through or not self.nodes[position].inputs:
                return value, before
            inputs = self.nodes[position].inputs
            # For an in-place copy the copied value counts; as for other operators, it is the first operand.
            value, before = inputs[0], position

    def root(self, value: str, before: int = _END) -> str:
        """Return the value behind views and casts."""
        return self.upstream(value, before)[0]

    def is_weight(self, value: str) -> bool:
        """Whether a value is from outside the graph, possibly viewed, cast, shifted or scaled by a number."""
        for _ in range(_WEIGHT_STEPS):
            position = self._producers.get(value, -1)
            if position < 0:
                return True
            node, name = self.nodes[position], self.names[position]
            if name in FACTORIES:
                return not node.inputs
            if name in VIEWS or name in CASTS or name in PARTS or (len(node.inputs) == 1 and name in _SCALINGS):
                value = node.inputs[0]
            else:
                return name == "index" and bool(node.inputs) and self.producer(node.inputs[0]) < 0
        return False

    def weight_root(self, value: str) -> str:
        """Return the outside value that a weight is a view, a part or a cast of."""
        for _ in range(_WEIGHT_STEPS):
            position = self._producers.get(value, -1)
            if position < 0 or not self.nodes[position].inputs:
                return value
            value = self.nodes[position].inputs[0]
        return value

    def linear(self, position: int) -> tuple[str, str] | None:
        """Return the input and the weight of a product with a weight, ``None`` if the node is no such product."""
        places = LINEAR_OPERANDS.get(self.names[position])
        if places is None:
            return None
        known = self._known.get(position, self)
        if known is self:
            known = self._known[position] = self._find_linear(position, *places)
        found: tuple[str, str] | None = known
        return found

    def _find_linear(self, position: int, given: int, weight: int) -> tuple[str, str] | None:
        x, w = self.operand(position, given), self.operand(position, weight)
        if x is None or w is None or not self.is_weight(w):
            return None
        if self.names[position] == "linear":
            return x, w
        size = self.size(w)
        return (x, w) if size is None or len(size) == 2 else None

    def is_gradient(self, position: int) -> bool:
        """Whether a product is the backward pass of an earlier one: it uses the same weight transposed."""
        return position in self.once(_gradients)

    def turns(self, value: str) -> int:
        """Count how often a weight is transposed between outside and this value."""
        count = 0
        for _ in range(_WEIGHT_STEPS):
            position = self._producers.get(value, -1)
            if position < 0 or not self.nodes[position].inputs:
                break
            count += self.names[position] in _TURNS
            value = self.nodes[position].inputs[0]
        return count

    def wrapped(self, position: int) -> Iterator[int]:
        """List a node with the views that belong only to it: of its operands before it, of its result after it."""
        for value in self.nodes[position].inputs:
            made = self.producer(value)
            if made >= 0 and self.names[made] in VIEWS and len(self.readers(value)) == 1:
                yield made
        yield position
        for reader in self.uses(position):
            if self.names[reader] in ("view", "_unsafe_view"):
                yield reader
                break

    def match(
        self, pattern: str, positions: Iterable[int], *, roles: dict[int, str] | None = None, **more: Any
    ) -> PatternMatch:
        """Create a match of the nodes at some positions."""
        nodes = tuple(self.nodes[position].id for position in sorted(set(positions)))
        named = {self.nodes[position].id: role for position, role in (roles or {}).items()}
        return PatternMatch(pattern, nodes, roles=named, **more)


def _gradients(index: Index) -> frozenset[int]:
    """Find the products that use a weight transposed relative to the first product with it."""
    first: dict[str, int] = {}
    found = []
    for position, name in enumerate(index.names):
        linear = index.linear(position)
        if linear is None:
            continue
        way = (index.turns(linear[1]) + (name == "linear")) % 2
        if first.setdefault(index.weight_root(linear[1]), way) != way:
            found.append(position)
    return frozenset(found)


_TURNS = frozenset({"t", "transpose", "permute", "mT", "numpy_T", "t_copy", "transpose_copy", "permute_copy"})
_SCALINGS = frozenset("add mul sub div rsub exp neg pow sqrt rsqrt reciprocal".split())
_indices: weakref.WeakKeyDictionary[Graph, Index] = weakref.WeakKeyDictionary()


def index_of(graph: Graph) -> Index:
    """Return the index of a graph.

    Concurrency:
        Any thread; two concurrent calls may each build one, and both are correct.
    """
    try:
        known = _indices.get(graph)
    except TypeError:  # a graph of another class, which cannot be a key
        return Index(graph)
    if known is None:
        known = Index(graph)
        try:
            _indices[graph] = known
        except TypeError:
            return known
    return known
