"""The tape: recorded operations that have not been handed over, in program order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from djinn.ir.phase import ExecutionPhase
from djinn.ir.program import Template
from djinn.ir.spec import TensorSpec
from djinn.ir.value import Slot

_RANDOM = 0
"""Stands for the random generator where storages are compared; values are numbered from 1."""


class Signature:
    """All that is known of an operation once its metadata has been inferred; shared by every node that repeats it.

    Attributes:
        template: The operator and the form of its arguments.
        template_number: The template's number within the session.
        results: Metadata of the new results, flat.
        aliases: For each of them: position among the tensor operands whose storage it shares, or -1.
        writes: Positions of the operands that are written.
        is_random: Whether random numbers are drawn.
        operands: Metadata of the tensor operands.
        has_effect: Whether it matters even if nobody keeps a result.
        phase: What it gives away of the work that it is part of; ``None`` if operations of its kind never do.
    """

    __slots__ = ("aliases", "has_effect", "is_random", "operands", "phase", "results", "template", "template_number",
                 "writes")

    def __init__(
        self,
        template: Template,
        template_number: int,
        results: tuple[TensorSpec | None, ...],
        aliases: tuple[int, ...],
        writes: tuple[int, ...],
        is_random: bool,
        operands: tuple[TensorSpec, ...],
        phase: ExecutionPhase | None = None,
    ) -> None:
        self.template = template
        self.template_number = template_number
        self.results = results
        self.aliases = aliases
        self.writes = writes
        self.is_random = is_random
        self.operands = operands
        self.phase = phase
        self.has_effect = bool(writes) or is_random or not results


class Node(msgspec.Struct, eq=False, gc=False):
    """One recorded operation.

    Attributes:
        signature: What it does.
        inputs: Its tensor operands, in order.
        outputs: Its new results, in order.
        numbers: Its lifted numbers, in order.
        origin: The user's line, in debug mode.
    """

    signature: Signature
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    numbers: Sequence[Any]
    origin: str = ""


class Tape:
    """Pending nodes.

    Concurrency:
        Any thread may append to ``nodes``; cutting is for the holder of the session's lock. Both rest on list
        operations that the interpreter carries out undivided.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def cut(self) -> list[Node]:
        """Take all nodes that are there now."""
        count = len(self.nodes)
        piece = self.nodes[:count]
        del self.nodes[:count]
        return piece

    def take(
        self, wanted: Sequence[Slot] | None, released: deque[int], dead: set[int]
    ) -> tuple[list[Node], set[int]]:
        """Take all nodes, or those that ``wanted`` needs, and tell which dead values go with them.

        What died is read before the tape: a value that is dead by then has all its uses on the tape, because a use is
        recorded while the value's tensor is alive. A dead value that a node left behind still reads stays until that
        node goes.

        Args:
            wanted: Values that are waited for; ``None``: take everything.
            released: Values that died lately; emptied into ``dead``.
            dead: Values that nobody names and that have not gone.
        """
        while released:
            dead.add(released.popleft())
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
    """Tell which nodes must run so that reading ``wanted`` now gives what whole execution in order would give.

    A node is needed if a needed node, or the reading itself, uses its result, or if the two touch one storage and at
    least one of them writes it. What stays behind may then run later: it neither feeds nor disturbs what goes ahead.
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
    """Leave out nodes whose results nobody can ever see and that change nothing."""
    used: set[Slot] = set()
    alive: list[Node] = []
    for node in reversed(nodes):
        if node.signature.has_effect or any(s.number not in released or s in used for s in node.outputs):
            used.update(node.inputs)
            alive.append(node)
    alive.reverse()
    return alive
