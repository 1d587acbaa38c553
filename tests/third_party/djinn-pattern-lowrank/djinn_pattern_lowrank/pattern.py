"""The pattern ``lowrank``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from djinn.kinds import PatternMatch
from djinn.model.graph import Graph, GraphNode
from djinn.model.spec import TensorSpec

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
        """The one node that reads the node's one result, if it does so once."""
        if len(node.outputs) != 1:
            return None
        readers = self.readers.get(node.outputs[0], ())
        return readers[0] if len(readers) == 1 and readers[0].inputs.count(node.outputs[0]) == 1 else None

    def last_size(self, value: str) -> int | None:
        """Extent of the value's last dimension, if the graph knows it."""
        producer = self.producers.get(value)
        if producer is None:
            return None
        return _last(producer.specs[producer.outputs.index(value)])


def _last(spec: TensorSpec | None) -> int | None:
    return spec.size[-1] if spec is not None and len(spec.size) else None


class LowRankPattern:
    """Finds ``(x @ a) @ b`` where ``x @ a`` is narrower than ``x`` and than the result, and is read by nobody else."""

    name = "lowrank"

    def find(self, graph: Graph) -> Sequence[PatternMatch]:
        """Find every low-rank product, in program order.

        The confidence is 1 where the graph shows both outer dimensions, and 0.5 where ``x`` comes from outside of the
        graph, so that only the result's is known.
        """
        nodes = graph.topological_sort()
        uses = _Uses.of(nodes)
        found = (self._at(node, uses) for node in nodes if _operator(node) in _LEFT)
        return [match for match in found if match is not None]

    def _at(self, first: GraphNode, uses: _Uses) -> PatternMatch | None:
        rank = _last(first.specs[0])
        chain = _chain(first, rank, uses)
        if rank is None or chain is None:
            return None
        wide = _last(chain[-1].specs[0])
        entering = uses.last_size(first.inputs[_LEFT[_operator(first)]])
        if wide is None or rank >= wide or (entering is not None and rank >= entering):
            return None
        return PatternMatch(
            self.name,
            tuple(node.id for node in chain),
            confidence=0.5 if entering is None else 1.0,
            hints={"rank": rank, "in_features": entering, "out_features": wide},
        )


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
