"""Information about a graph that all tiers need, collected in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.analyzer.facts import OperatorFacts, operator_facts
from djinn_plugins.graph.analyzer.flops import has_formula
from djinn_plugins.graph.graph import Graph, GraphNode


@attrs.frozen(eq=False)
class Survey:
    """A graph indexed by position, which is faster than by name."""

    graph: Graph
    nodes: Sequence[GraphNode]
    positions: Mapping[str, int]
    """By node identifier."""
    facts: Sequence[OperatorFacts]
    """Facts about each node's operator."""
    operands: Sequence[tuple[TensorSpec | None, ...]]
    """Metadata of each node's inputs."""
    results: Sequence[tuple[TensorSpec | None, ...]]
    """Metadata of each node's outputs, including metadata that only their readers have."""
    may_cost: Sequence[bool]
    """Whether a node's operator may cost floating-point operations."""
    reads: Sequence[tuple[str, ...]]
    """The storages of each node's inputs."""
    makes: Sequence[tuple[str, ...]]
    """The storages of each node's outputs."""
    is_view: Sequence[bool]
    """Whether a node's output is only a view of existing memory."""
    producer: Mapping[str, int]
    """By value: the node that makes it."""
    readers: Mapping[str, Sequence[int]]
    """By value: the nodes that read it, in order."""
    specs: Mapping[str, TensorSpec | None]
    """By value."""
    outside: Sequence[str]
    """Values that no node makes, in the order in which they are read."""

    def base(self, value: str) -> str:
        """Return the value whose storage this one shares; itself, if it has its own."""
        return self.graph.storages.get(value, value)

    def is_outside(self, value: str) -> bool:
        """Whether a value, or the base of a view, comes from outside."""
        return self.base(value) not in self.producer


def survey(graph: Graph) -> Survey:
    """Read a graph."""
    nodes, storages = graph.nodes(), graph.storages
    producer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    specs: dict[str, TensorSpec | None] = {}
    outside: list[str] = []
    facts: list[OperatorFacts] = []
    may_cost: list[bool] = []
    reads: list[tuple[str, ...]] = []
    makes: list[tuple[str, ...]] = []
    operands: list[tuple[TensorSpec | None, ...]] = []
    untold: set[int] = set()
    is_view: list[bool] = []
    known: dict[str, tuple[OperatorFacts, bool]] = {}
    for position, node in enumerate(nodes):
        if node.operation not in known:
            fact = operator_facts(node.operation)
            known[node.operation] = fact, has_formula(fact.operator, fact.name)
        fact, costs = known[node.operation]
        facts.append(fact)
        may_cost.append(costs)
        reads.append(tuple([storages.get(value, value) for value in node.inputs]))
        makes.append(tuple([storages.get(value, value) for value in node.outputs]))
        given = node.input_specs
        if len(given) != len(node.inputs):
            given = tuple(map(specs.get, node.inputs))
        operands.append(given)
        for place, value in enumerate(node.inputs):
            found = readers.get(value)
            if found is None:
                readers[value] = [position]
                if value not in producer:
                    outside.append(value)
                if specs.get(value) is None:
                    specs[value] = given[place]
            elif found[-1] != position:
                found.append(position)
        for place, value in enumerate(node.outputs):
            producer[value] = position
            specs[value] = spec = node.specs[place] if place < len(node.specs) else None
            if spec is None:
                untold.add(position)
        is_view.append(fact.may_view and bool(node.outputs) and node.outputs[0] in storages)
    results = [tuple(map(specs.get, node.outputs)) if position in untold else node.specs
               for position, node in enumerate(nodes)]
    return Survey(graph, nodes, {node.id: position for position, node in enumerate(nodes)}, facts, operands, results,
                  may_cost, reads, makes, is_view, producer, readers, specs, outside)
