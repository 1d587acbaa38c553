"""Converts a piece of tape to a graph for analyzers, patterns and schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from djinn.ir.program import Argument, ConstantArgument, ListArgument, NumberArgument, TensorArgument
from djinn.ir.tape import Node
from djinn_plugins.graph.graph import GraphNode, Operand, Origin, RecordedGraph, ValueInfo
from djinn_plugins.graph.links import GraphLinks, NodeMetadata, ValueId
from djinn_plugins.graph.returned import Returned

_NOWHERE = Origin()


def graph_of(
    nodes: Sequence[Node], origins: Sequence[Origin] = (), values: Mapping[str, ValueInfo] | None = None,
    returned: Returned | None = None,
) -> RecordedGraph:
    """View a piece of tape as a graph.

    Args:
        nodes: The piece, in program order.
        origins: Where each node was recorded; empty if it was not watched.
        values: Metadata of values from outside, by identifier.
        returned: What the call returned that recorded the piece, if it was one call.
    """
    made = []
    links = GraphLinks()
    slots = {slot.number for node in nodes for slot in (*node.inputs, *node.outputs)}
    # One object for each value: mappings find it by identity.
    names = {number: ValueId.linked(f"v{number}", links) for number in slots}
    for position, node in enumerate(nodes):
        signature = node.signature
        template = signature.template
        operands, numbers = iter(range(len(node.inputs))), iter(node.numbers)
        made.append(GraphNode(
            id=f"n{position}",
            operation=template.operator,
            inputs=tuple(names[slot.number] for slot in node.inputs),
            outputs=tuple(names[slot.number] for slot in node.outputs),
            specs=signature.results,
            writes=tuple(names[node.inputs[index].number] for index in signature.writes),
            is_random=signature.is_random,
            input_specs=signature.operands,
            arguments=tuple(_argument(argument, operands, numbers) for argument in template.arguments),
            keywords={name: _argument(argument, operands, numbers) for name, argument in template.keywords},
            origin=origins[position] if origins else _NOWHERE,
            metadata=NodeMetadata(links, f"n{position}"),
        ))
    graph = links.graph = RecordedGraph(tuple(made), _storages_of(nodes), values=values or {},
                                        returned=returned)
    return graph


def _storages_of(nodes: Sequence[Node]) -> dict[str, str]:
    """Map views to the storage they share; if its owner is not present, the first such view represents it.

    After ``set_``, a value has another storage than its earlier views. Both count as one: what uses either stays in
    order.
    """
    slots: dict[int, int] = {}
    joined: dict[int, int] = {}

    def root(storage: int) -> int:
        while storage in joined:
            storage = joined[storage]
        return storage

    for node in nodes:
        slots.update((slot.number, slot.storage) for slot in (*node.inputs, *node.outputs))
        for slot, alias in zip(node.outputs, node.signature.aliases, strict=False):
            if alias >= 0 and slot.storage != node.inputs[alias].storage:
                one, other = root(slot.storage), root(node.inputs[alias].storage)
                if one != other:
                    joined[one] = other
    owners: dict[int, int] = {}
    for number, storage in slots.items():
        owner = root(storage)
        owners.setdefault(owner, owner if slots.get(owner) == owner else number)
    return {f"v{number}": f"v{owner}" for number, storage in slots.items()
            if (owner := owners[root(storage)]) != number}


def _argument(form: Argument, operands: Iterator[int], numbers: Iterator[Any]) -> Any:
    """Fill in the form of an argument; PyTorch constants are represented by their names."""
    if isinstance(form, TensorArgument):
        return Operand(next(operands))
    if isinstance(form, NumberArgument):
        number = next(numbers)
        return list(number) if isinstance(number, tuple) else number
    if isinstance(form, ListArgument):
        return [_argument(item, operands, numbers) for item in form.items]
    return form.value if isinstance(form, ConstantArgument) else form.name
