"""Views on several executors: operations that cost nothing are repeated instead of moving their results."""

from __future__ import annotations

from djinn.ir.tape import Node
from djinn_plugins.fleet.directory import Directory
from djinn_plugins.graph.views import is_view_anywhere


def view_chain(number: int, executor: int, where: Directory) -> tuple[list[Node], int]:
    """List the operations that make a value, as a view of a view of ..., of one that an executor has.

    Returns:
        The operations, and the value that the first of them is a view of. If the executor has none of the bases, this
        is the earliest base from which all operations are known. If the value is not such a view, there are no
        operations.
    """
    nodes: list[Node] = []
    while not where.is_at(number, executor):
        held = where.find(number)
        node = None if held is None else held.view
        if node is None or len(node.inputs) != 1 or not is_view_anywhere(node.signature.template.operator):
            break
        if node.inputs[0].number not in where:
            break
        nodes.append(node)
        number = node.inputs[0].number
    nodes.reverse()
    return nodes, number
