"""Tensors of stored models: loaded before other work, in the order in which they are placed."""

from __future__ import annotations

from collections.abc import Sequence

from djinn.ir.tape import Node
from djinn_plugins.common.operators.stored_models import STORED_TENSOR

__all__ = ("are_loads", "loads_first")


def loads_first(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Divide a piece of tape into the operations that load stored tensors, and all others.

    The first part can run before the second: an operation that loads reads nothing but a tensor without elements, and
    the operation that makes that one is moved with it. If that one reads anything, nothing is moved.
    """
    loads = {id(node) for node in nodes if _is_load(node)}
    if not loads or len(loads) == len(nodes):
        return ([*nodes], []) if loads else ([], [*nodes])
    read = {slot.number for node in nodes if id(node) in loads for slot in node.inputs}
    makers = [node for node in nodes if any(slot.number in read for slot in node.outputs)]
    if any(node.inputs or node.signature.is_random for node in makers):
        return [], [*nodes]
    loads.update(map(id, makers))
    return ([node for node in nodes if id(node) in loads], [node for node in nodes if id(node) not in loads])


def are_loads(nodes: Sequence[Node]) -> bool:
    """Whether a piece of tape is the first part that `loads_first` returns."""
    return all(_is_load(node) or not node.inputs for node in nodes) and any(map(_is_load, nodes))


def _is_load(node: Node) -> bool:
    return node.signature.template.operator.partition(".")[0] == STORED_TENSOR
