"""The tape: recorded operations that have not been submitted, in program order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import msgspec

from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import Template
from djinn.ir.spec import TensorSpec
from djinn.ir.value import Slot

_RANDOM = 0
"""Represents the random generator where storages are compared; values are numbered from 1."""


@attrs.define(eq=False)
class Signature:
    """Everything known about an operation after its metadata has been inferred; shared by every node that repeats it.

    Attributes:
        template: The operator and the form of its arguments.
        template_number: The template's number within the session.
        results: Metadata of the new results, flat.
        aliases: For each of them: position among the tensor operands whose storage it shares, or -1.
        writes: Positions of the operands that are written.
        is_random: Whether random numbers are drawn.
        operands: Metadata of the tensor operands.
        has_effect: Whether it must run even if no result is kept.
        phase: The execution phase that it reveals; ``None`` if operations of its kind never reveal one.
    """

    template: Template
    template_number: int
    results: tuple[TensorSpec | None, ...]
    aliases: tuple[int, ...]
    writes: tuple[int, ...]
    is_random: bool
    operands: tuple[TensorSpec, ...]
    phase: ExecutionPhase | None = None
    has_effect: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.has_effect = bool(self.writes) or self.is_random or not self.results


class Node(msgspec.Struct, eq=False, gc=False):
    """One recorded operation.

    Attributes:
        signature: The signature of its operation.
        inputs: Its tensor operands, in order.
        outputs: Its new results, in order.
        numbers: Its lifted numbers, in order.
        origin: The line of user code, in debug mode.
    """

    signature: Signature
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    numbers: Sequence[Any]
    origin: str = ""


class Tape:
    """Pending nodes.

    Concurrency:
        Any thread may append to ``nodes``; only the holder of the session's lock may cut. Both rely on list operations
        that the interpreter executes atomically.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def cut(self) -> list[Node]:
        """Take all current nodes."""
        count = len(self.nodes)
        piece = self.nodes[:count]
        del self.nodes[:count]
        return piece

    def take(self, wanted: Sequence[Slot] | None, released: deque[int], dead: set[int]) -> tuple[list[Node], set[int]]:
        """Take all nodes, or those that ``wanted`` needs, and return which dead values can be freed with them.

        The list of dead values is read before the tape. All uses of a value that is dead by then are on the tape,
        because uses are recorded while the value's tensor is alive. A dead value that a remaining node still reads
        stays until that node is taken.

        Args:
            wanted: Requested values; ``None``: take everything.
            released: Values that died recently; emptied into ``dead``.
            dead: Values that are no longer referenced but not freed yet.
        """
        dead.update([released.popleft() for _ in range(len(released))])
        nodes = self.cut() if wanted is None else self.cut_slice(wanted)
        busy = {slot.number for node in self.nodes for slot in (*node.inputs, *node.outputs)}
        return nodes, dead - busy

    def cut_slice(self, wanted: Iterable[Slot]) -> list[Node]:
        """Take the nodes that ``wanted`` needs, and leave the rest in order."""
        count = len(self.nodes)
        piece = self.nodes[:count]
        needed = needed_for(piece, wanted)
        self.nodes[:count] = [node for node, is_needed in zip(piece, needed, strict=True) if not is_needed]
        return [node for node, is_needed in zip(piece, needed, strict=True) if is_needed]


def needed_for(nodes: Sequence[Node], wanted: Iterable[Slot]) -> list[bool]:
    """Return which nodes must run so that reading ``wanted`` now gives the same result as running all nodes in order.

    A node is needed if a needed node, or the reading itself, uses its result, or if the two access one storage and at
    least one of them writes it. The other nodes may run later: they neither feed nor disturb the needed ones.
    """
    values = set(wanted)
    reads = {slot.storage for slot in values}
    writes: set[int] = set()
    needed = [False] * len(nodes)
    for position in range(len(nodes) - 1, -1, -1):
        node = nodes[position]
        signature = node.signature
        written = {node.inputs[index].storage for index in signature.writes}
        read = {slot.storage for slot in node.inputs}
        if signature.is_random:
            written.add(_RANDOM)
            read.add(_RANDOM)
        feeds = not values.isdisjoint(node.outputs)
        if feeds or not written.isdisjoint(reads) or not read.isdisjoint(writes):
            needed[position] = True
            values.update(node.inputs)
            reads |= read
            writes |= written
    return needed


def without_dead(nodes: Sequence[Node], released: set[int]) -> list[Node]:
    """Leave out nodes whose results cannot be observed and that change nothing."""
    used: set[Slot] = set()
    alive: list[Node] = []
    for node in reversed(nodes):
        if node.signature.has_effect or not used.isdisjoint(node.outputs) or (
                not released.issuperset([slot.number for slot in node.outputs])):
            used.update(node.inputs)
            alive.append(node)
    alive.reverse()
    return alive
