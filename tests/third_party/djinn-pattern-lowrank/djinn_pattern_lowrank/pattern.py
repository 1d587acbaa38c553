"""The pattern ``lowrank``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.kinds import PatternMatch

_LEFT: Mapping[str, int] = MappingProxyType({
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::matmul": 0,
    "aten::linear": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
})
"""Matrix products, each with the position of its left factor among its inputs."""

_RESHAPING = frozenset({
    "aten::view",
    "aten::_unsafe_view",
    "aten::reshape",
    "aten::expand",
    "aten::unsqueeze",
})
"""What stands between the products of a batch; passed through where the last dimension stays."""

_SAME = _RESHAPING | {"aten::dropout", "aten::native_dropout", "aten::_to_copy", "aten::detach", "aten::t"}
"""What may stand between a layer's input and its products, or between a weight and the product that reads it."""

_SCALING = frozenset({"aten::mul.Tensor", "aten::mul.Scalar", "aten::div.Tensor", "aten::div.Scalar"})
_ADDING = frozenset({"aten::add.Tensor", "aten::add_.Tensor"})
_FOR_BACKWARD = frozenset({"aten::t", "aten::transpose.int", "aten::detach"})
"""How autograd reads a result once more, to make the gradients of the weights."""


def _operator(node: GraphNode) -> str:
    """Qualified name; a default overload has none of its own in PyTorch's schemas."""
    return node.operation.removesuffix(".default")


@attrs.frozen
class _Uses:
    """Who makes and who reads each value."""

    producers: Mapping[str, GraphNode]
    readers: Mapping[str, Sequence[GraphNode]]

    @classmethod
    def of(cls, nodes: Sequence[GraphNode]) -> _Uses:
        producers = {value: node for node in nodes for value in node.outputs}
        readers: dict[str, list[GraphNode]] = {}
        for node in nodes:
            for value in dict.fromkeys(node.inputs):
                readers.setdefault(value, []).append(node)
        return cls(producers, readers)

    def only_reader(self, node: GraphNode) -> GraphNode | None:
        """The one node that reads the node's one result, if it does so once; backward may read it as well."""
        if len(node.outputs) != 1:
            return None
        readers = [reader for reader in self.readers.get(node.outputs[0], ())
                   if _operator(reader) not in _FOR_BACKWARD and not self._makes_gradient(reader, node.outputs[0])]
        return readers[0] if len(readers) == 1 and readers[0].inputs.count(node.outputs[0]) == 1 else None

    def _makes_gradient(self, reader: GraphNode, value: str) -> bool:
        """Whether a product takes the value as its right factor, and something transposed as its left: a gradient."""
        if _operator(reader) != "aten::mm" or reader.inputs[1] != value:
            return False
        left = self.producers.get(reader.inputs[0])
        return left is not None and _operator(left) == "aten::t"

    def last_size(self, value: str, reader: GraphNode) -> int | None:
        """Extent of the value's last dimension, if the graph knows it."""
        producer = self.producers.get(value)
        if producer is not None:
            return _last(producer.specs[producer.outputs.index(value)])
        return _last(reader.input_specs[reader.inputs.index(value)]) if reader.input_specs else None

    def root(self, value: str) -> str:
        """What the value is behind views, casts and dropout."""
        producer = self.producers.get(value)
        while producer is not None and _operator(producer) in _SAME and producer.inputs:
            value = producer.inputs[0]
            producer = self.producers.get(value)
        return value

    def product_behind(self, value: str) -> list[GraphNode]:
        """The product that a value is a view of, with the views; nothing if it is none."""
        way: list[GraphNode] = []
        producer = self.producers.get(value)
        while producer is not None and _operator(producer) in _RESHAPING and producer.inputs:
            way.append(producer)
            producer = self.producers.get(producer.inputs[0])
        return [producer, *reversed(way)] if producer is not None and _operator(producer) in _LEFT else []


def _last(spec: TensorSpec | None) -> int | None:
    return spec.size[-1] if spec is not None and len(spec.size) else None


class LowRankPattern:
    """Finds ``(x @ a) @ b`` where ``x @ a`` is narrower than ``x`` and than the result, and is read by nobody else.

    Where the result, perhaps scaled, is added to another product of the same ``x``, all of it is one match: an adapter
    in the manner of LoRA, with the layer that it adapts.
    """

    name = "lowrank"
    capabilities = frozenset({"disjoint"})

    def find(self, graph: Graph) -> Sequence[PatternMatch]:
        """Find every low-rank product, in program order.

        The confidence is 1 where the graph shows both outer dimensions, and 0.5 where it shows the result's only.
        """
        nodes = graph.topological_sort()
        uses = _Uses.of(nodes)
        order = {node.id: position for position, node in enumerate(nodes)}
        taken: set[str] = set()
        pairs: set[tuple[str, str]] = set()
        found = []
        for node in nodes:
            match = self._at(node, uses, order) if _operator(node) in _LEFT and node.id not in taken else None
            if match is None or not taken.isdisjoint(match.nodes):
                continue
            down, up = uses.root(match.values["down"]), uses.root(match.values["up"])
            if (up, down) not in pairs:  # backward takes the same weights the other way round
                pairs.add((down, up))
                taken.update(match.nodes)
                found.append(match)
        return found

    def _at(self, first: GraphNode, uses: _Uses, order: Mapping[str, int]) -> PatternMatch | None:
        rank = _last(first.specs[0]) if first.specs else None
        chain = _chain(first, rank, uses)
        if rank is None or chain is None:
            return None
        wide = _last(chain[-1].specs[0])
        x = first.inputs[_LEFT[_operator(first)]]
        entering = uses.last_size(x, first)
        if wide is None or rank >= wide or (entering is not None and rank >= entering):
            return None
        adapted = _adapted(chain[-1], uses.root(x), uses)
        nodes = sorted({node.id for node in (*chain, *adapted)}, key=order.__getitem__)
        roles = {first.id: "down_projection", chain[-1].id: "up_projection"}
        values = {"input": x, "down": first.inputs[-1], "up": chain[-1].inputs[-1]}
        if adapted:
            roles |= {adapted[0].id: "adapted_projection", adapted[-1].id: "sum"}
        return PatternMatch(
            self.name,
            tuple(nodes),
            confidence=0.5 if entering is None else 1.0,
            hints={"rank": rank, "in_features": entering, "out_features": wide, "merge_into_weight": bool(adapted)},
            roles=roles,
            values=values,
            metadata={"kind": "adapter" if adapted else "factorised", "scaling": _scaling(adapted)},
        )


def _adapted(up: GraphNode, x: str, uses: _Uses) -> list[GraphNode]:
    """Follow the result, through its scale, to where it is added to another product of the same input.

    Returns:
        That product first, its views, what stands between, and the sum last; nothing if there is no such product.
    """
    way: list[GraphNode] = []
    here = up
    for _ in range(6):
        follower = uses.only_reader(here)
        if follower is None or not here.outputs:
            return []
        if follower.operation in _ADDING and len(follower.inputs) > 1:
            other = follower.inputs[1] if follower.inputs[0] == here.outputs[0] else follower.inputs[0]
            base = uses.product_behind(other)
            if not base or uses.root(base[0].inputs[_LEFT[_operator(base[0])]]) != x:
                return []
            return [*base, *way, follower]
        if follower.operation not in _SCALING and _operator(follower) not in _RESHAPING:
            return []
        way.append(follower)
        here = follower
    return []


def _scaling(adapted: Sequence[GraphNode]) -> float | None:
    """The number by which an adapter's result is scaled, if the graph tells it."""
    factor = 1.0
    for node in adapted:
        if node.operation in _SCALING:
            number = node.arguments[1] if len(node.arguments) > 1 else None
            if not isinstance(number, (int, float)) or not number:
                return None
            factor = factor / number if "div" in node.operation else factor * number
    return factor if adapted else None


def _chain(first: GraphNode, rank: int | None, uses: _Uses) -> list[GraphNode] | None:
    """Follow a product's result, through what only reshapes it, to the product whose left factor it is."""
    chain = [first]
    while True:
        here = chain[-1]
        follower = uses.only_reader(here)
        if follower is None or here.outputs[0] in follower.writes:
            return None
        chain.append(follower)
        if _operator(follower) in _LEFT:
            left = _LEFT[_operator(follower)]
            return chain if left < len(follower.inputs) and follower.inputs[left] == here.outputs[0] else None
        if _operator(follower) not in _RESHAPING or _last(follower.specs[0]) != rank:
            return None
