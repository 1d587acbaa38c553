"""The latest operations of a program, and which of the values that they name are still alive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import attrs

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn_plugins.common.operators.harmless import is_harmless

__all__ = ("History", "OperandSource", "Tail", "form_of")

MAX_NODES = 8192
"""Nodes in each of the two generations."""
MAX_WATCHED = 4096
"""Values whose life is watched although the operations that name them may be forgotten."""


@attrs.frozen(eq=False)
class Tail:
    """The operations before a wait.

    Attributes:
        end: How many nodes had been recorded.
        pending: How many of them had been sent before.
        since: How many had been recorded at the wait before.
        more: Nodes that follow them, which are recorded only ahead of the program.
    """

    end: int = 0
    pending: int = 0
    since: int = 0
    more: tuple[Node, ...] = ()

    def followed_by(self, nodes: Sequence[Node]) -> Tail:
        """Return these operations and others after them."""
        return attrs.evolve(self, more=(*self.more, *nodes))


@attrs.frozen(eq=False)
class OperandSource:
    """How to find an operand again at another wait.

    Attributes:
        spec: The metadata that it must have; rows of a tensor may begin elsewhere in its storage.
        distance: It belongs to the n-th last node.
        position: Which result of that node, or, as -1 - i, which operand.
        is_recent: Whether it was used since the wait before: if so, it is probably another value each time.
        slot: The value itself, which a program may use for long; ``None`` if it was dead already.
    """

    spec: TensorSpec
    distance: int
    position: int
    is_recent: bool
    slot: Slot | None


@attrs.define(eq=False)
class _Generation:
    """Nodes, and what happened to values since the first of them was recorded."""

    nodes: list[Node] = attrs.field(factory=list)
    dead: set[int] = attrs.field(factory=set)
    changed: set[int] = attrs.field(factory=set)
    """Values that an operation has written which may have failed, or changed their metadata."""


def form_of(spec: TensorSpec | None) -> tuple[Any, ...] | None:
    """Return the metadata of a value, but for where in its storage it begins."""
    return None if spec is None else (spec.size, spec.stride, spec.dtype, spec.device)


class History:
    """Remembers nodes in two generations: when the newer one is full, the older one is dropped.

    A value is mentioned before it dies. The deaths that matter for a generation are therefore those since it began.
    """

    def __init__(self) -> None:
        self._older, self._newer = _Generation(), _Generation()
        self._begin = 0
        """How many nodes were recorded before the older generation."""
        self.sent = 0
        """How many nodes there were before the last ones were added."""
        self._watched: set[int] = set()

    @property
    def end(self) -> int:
        """How many nodes have been recorded."""
        return self._begin + len(self._older.nodes) + len(self._newer.nodes)

    def add(self, nodes: Sequence[Node]) -> None:
        """Add nodes that the program has recorded.

        Args:
            nodes: The nodes; values that they use have not died before the last call, or before the history was empty.
        """
        self.sent = self.end
        self._newer.nodes += nodes
        for node in nodes:
            signature = node.signature
            for index in signature.writes:
                if not is_harmless(signature):
                    self._newer.changed.add(node.inputs[index].number)
                    self._watched.discard(node.inputs[index].number)
        if len(self._newer.nodes) > MAX_NODES:
            self._begin += len(self._older.nodes)
            self._older, self._newer = self._newer, _Generation()

    def clear(self) -> None:
        """Forget all nodes: there are others, which are not known."""
        self._begin = self.end
        self._older, self._newer = _Generation(), _Generation()
        self._watched.clear()

    def died(self, numbers: Sequence[int]) -> None:
        """Note that the program no longer refers to values."""
        self._newer.dead.update(numbers)
        self._watched.difference_update(numbers)

    def origins_of(self, slots: Sequence[Slot], tail: Tail) -> list[OperandSource | None]:
        """Say how to find operands again, by the last node before a wait that used or made each."""
        missing = {slot.number for slot in slots}
        found: dict[int, OperandSource] = {}
        for distance, node in enumerate(self._backwards(tail), start=1):
            if not missing:
                break
            signature = node.signature
            places = chain(zip(range(len(node.outputs)), node.outputs, signature.results, strict=False),
                           zip(range(-1, -1 - len(node.inputs), -1), node.inputs, signature.operands, strict=False))
            for position, slot, spec in places:
                if slot.number in missing and spec is not None:
                    missing.discard(slot.number)
                    is_recent = tail.end - distance >= tail.since
                    found[slot.number] = OperandSource(spec, distance, position, is_recent, self._watch(slot))
        return [found.get(slot.number) for slot in slots]

    def find(self, origin: OperandSource, tail: Tail, *, is_exact: bool = False) -> Slot | None:
        """Find a value that has an origin's metadata and can be used by an operation now; ``None`` if there is none.

        Args:
            origin: How to find it.
            tail: The operations before.
            is_exact: Whether it must also be at the same place in its storage.
        """
        kept = origin.slot
        if kept is not None and kept.number not in self._watched:
            kept = None
        if kept is not None and not origin.is_recent:
            return kept
        return self._at(origin, tail, is_exact=is_exact) or kept

    def recent(self, tail: Tail) -> Sequence[Node]:
        """Return the nodes between a wait and the one before, as far as they are remembered."""
        return list(islice(self._backwards(tail), tail.end - tail.since))

    def _at(self, origin: OperandSource, tail: Tail, *, is_exact: bool) -> Slot | None:
        more = len(tail.more)
        index = tail.end + more - origin.distance
        is_pending = index >= tail.pending
        if origin.distance <= more:
            node = tail.more[-origin.distance]
        else:
            index -= self._begin
            if index < 0:
                return None
            older = len(self._older.nodes)
            node = self._older.nodes[index] if index < older else self._newer.nodes[index - older]
        position, signature = origin.position, node.signature
        slots, specs = (node.outputs, signature.results) if position >= 0 else (node.inputs, signature.operands)
        position = position if position >= 0 else -1 - position
        if position >= min(len(slots), len(specs)):
            return None
        slot, spec = slots[position], specs[position]
        if spec is not origin.spec and (is_exact or form_of(spec) != form_of(origin.spec)):
            return None
        if slot.number in self._newer.changed or slot.number in self._older.changed:
            return None
        return slot if is_pending or self._is_alive(slot) else None

    def _backwards(self, tail: Tail) -> chain[Node]:
        end = tail.end - self._begin
        newer = self._newer.nodes[:max(end - len(self._older.nodes), 0)]
        return chain(reversed(tail.more), reversed(newer), reversed(self._older.nodes[:max(end, 0)]))

    def _is_alive(self, slot: Slot) -> bool:
        return slot.number not in self._newer.dead and slot.number not in self._older.dead

    def _watch(self, slot: Slot) -> Slot | None:
        if not self._is_alive(slot) or slot.number in self._newer.changed or slot.number in self._older.changed:
            return None
        if len(self._watched) >= MAX_WATCHED:
            self._watched.clear()
        self._watched.add(slot.number)
        return slot
