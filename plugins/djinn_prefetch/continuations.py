"""Small values that a program asked for next when it last waited at a place: computed and fetched with the first one.

A loop that waits for a flag, and then for another that is made of the same values, needs both in one round trip. The
operations that led from the first wait to the second are repeated ahead of the program: the executor computes the
second value with the first. It is given to the program only if that records the same operations on the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dis import opname
from functools import lru_cache
from itertools import compress, islice
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import attrs

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node, Signature, needed_for
from djinn.ir.value import Slot
from djinn_prefetch.harmless import is_harmless, is_repeatable, moved_bytes

__all__ = ("Continuations", "ForeseenValue", "Place", "place_of")

MAX_BETWEEN = 48
"""Operations between a wait and what follows it."""
MAX_TAIL = 48
"""Operations before a wait whose values may be used after it."""
MAX_CHAIN = 8
"""Waits that are foreseen at one."""
MAX_BYTES = 64 * 1024
"""Size of a value that is fetched so."""
MAX_MOVED_BYTES = 2**20
"""Bytes that the executor reads and writes for it."""
MAX_PLACES = 1024
MAX_PAUSE = 256
"""How many waits at a place pass, at most, until it is tried again after it was in vain."""

_Position = tuple[int | None, int | None, int | None, int | None]
Place = tuple[ref[CodeType], _Position, ref[CodeType] | None, _Position | None]
"""Where a program waits: code, and position in its text, of the innermost caller outside djinn and of its caller."""
Source = tuple[int, int]
"""Where an operand comes from: the n-th result of the steps (0, n); or of the node that was the n-th last before the
wait, the result (n, i) or the operand (n, -1 - i).
"""


def place_of(frame: FrameType) -> Place:
    """Return where a frame is, keeping nothing of it alive."""
    code, caller = ref(frame.f_code), frame.f_back
    position = _position(code, frame.f_lasti)
    if caller is None:
        return code, position, None, None
    above = ref(caller.f_code)
    return code, position, above, _position(above, caller.f_lasti)


@lru_cache(4096)
def _position(alive: ref[CodeType], instruction: int) -> _Position:
    """Return the number of an instruction, or the text of a call, which may be one of several instructions."""
    code = alive()
    if code is None or "CALL" not in opname[code.co_code[instruction]]:
        return instruction, None, None, None
    return next(islice(code.co_positions(), instruction // 2, None), (instruction, None, None, None))


@attrs.frozen(eq=False)
class _Step:
    signature: Signature
    operands: tuple[Source, ...]
    numbers: Sequence[Any]


@attrs.frozen(eq=False)
class _Continuation:
    """The operations from one wait to another, and which of their results was asked for."""

    steps: tuple[_Step, ...]
    wanted: int
    place: Place


@attrs.define(eq=False)
class _Habit:
    """The waits that followed a wait at one place.

    Attributes:
        chain: The waits that followed, in order.
        pause: How many waits there passed at last until it was tried again.
        left: How many of them are still to pass.
    """

    chain: list[_Continuation] = attrs.field(factory=list)
    pause: int = 0
    left: int = 0

    def add(self, found: _Continuation) -> None:
        """Expect another wait after those that are expected."""
        self.chain = [*(known for known in self.chain if known.place != found.place), found]

    def remove(self, unused: _Continuation) -> None:
        """Expect a wait no longer."""
        self.chain = [known for known in self.chain if known is not unused]
        if not self.chain:
            self.rest()

    def rest(self) -> None:
        """Try it less often."""
        self.pause = self.left = min(2 * self.pause + 1, MAX_PAUSE)


@attrs.define(eq=False)
class ForeseenValue:
    """A value that is computed before the program asks for it.

    Attributes:
        nodes: The operations that compute it.
        wanted: Its name.
        spec: Its metadata; ``None`` for a Python value.
        continuation: The continuation that it repeats.
        habit: The habit that this belongs to.
        value: The value, once it is here.
    """

    nodes: list[Node]
    wanted: Slot
    spec: TensorSpec | None
    continuation: _Continuation
    habit: _Habit
    value: Any = None


class Continuations:
    """Foresees waits, and answers them.

    Args:
        numbers: Gives numbers to values.

    Attributes:
        fetched: How many values were fetched before they were asked for.
        fetched_bytes: Their size.
        unused: How many of them were dropped.
        unused_bytes: Their size.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self.fetched = self.fetched_bytes = self.unused = self.unused_bytes = 0
        self._numbers = numbers
        self._habits: dict[Place, _Habit] = {}
        self._ahead: list[ForeseenValue] = []
        self._place: Place | None = None
        """Where the program waited at last."""
        self._visited: set[Place] = set()
        self._tail: tuple[Node, ...] = ()
        self._since: list[Node] | None = None
        self._taken = 0
        self._is_paused = False

    def answer(self, place: Place, slot: Slot, pending: Sequence[Node], taken: int) -> ForeseenValue | None:
        """Return the value of a slot if it was foreseen; the caller then owns it.

        Args:
            place: Where the program waits.
            slot: The requested value.
            pending: The tape.
            taken: How many nodes were taken off it so far.
        """
        if not self._ahead:
            return None
        between = self._between(pending, taken)
        if between is None or not all(is_harmless(node.signature) for node in between):
            self.drop()
            return None
        needed = list(compress(between, needed_for(between, (slot,))))
        for position, expected in enumerate(self._ahead):
            if _is_same(expected, needed, slot):
                self._count_unused(self._ahead[:position])
                del self._ahead[:position + 1]
                self._visited |= {place, expected.continuation.place}
                expected.habit.pause = 0
                return expected
        return None

    def sent(self, pending: Sequence[Node], before: int, taken: int) -> None:
        """Note that everything pending was sent without a wait."""
        between = self._between(pending, before)
        if between is None or taken - before != len(pending):
            self.forget()
        else:
            self._since, self._taken = between, taken

    def foresee(self, place: Place, slot: Slot, pending: Sequence[Node], taken: int) -> list[ForeseenValue]:
        """Learn from a wait that was not foreseen, and foresee the waits after it.

        Args:
            place: Where the program waits.
            slot: The requested value.
            pending: The tape.
            taken: How many nodes were taken off it so far.
        """
        self.drop()
        self._learn(place, slot, pending, taken)
        self._place, self._visited, self._tail = place, {place}, tuple(pending[-MAX_TAIL:])
        habit = self._habits.get(place)
        self._is_paused = habit is not None and habit.left > 0
        if habit is None:
            return []
        if self._is_paused:
            habit.left -= 1
            return []
        return self._made(habit)

    def arrived(self, expected: Sequence[ForeseenValue], values: Sequence[Any], taken: int, *, is_exact: bool) -> None:
        """Take the values that came with the answer to a wait.

        Args:
            expected: The foreseen values.
            values: The values.
            taken: How many nodes were taken off the tape so far.
            is_exact: Whether nothing was recorded, while it was sent, that may have changed them since.
        """
        self._since, self._taken = [], taken
        for one, value in zip(expected, values, strict=True):
            one.value = value
            self.fetched += 1
            self.fetched_bytes += one.spec.size_bytes if one.spec is not None else 0
        self._ahead = list(expected)
        if not is_exact:
            self.forget()

    def drop(self) -> None:
        """Drop the foreseen values: they were not requested, or may no longer be true."""
        if self._ahead:
            self._count_unused(self._ahead)
            self._ahead = []

    def forget(self) -> None:
        """Drop all that is known of the last wait: something happened that is not on the tape."""
        self.drop()
        self._place = self._since = None
        self._tail = ()

    def _count_unused(self, dropped: Sequence[ForeseenValue]) -> None:
        for one in dropped:
            self.unused += 1
            self.unused_bytes += one.spec.size_bytes if one.spec is not None else 0
            one.habit.remove(one.continuation)

    def _between(self, pending: Sequence[Node], taken: int) -> list[Node] | None:
        """Return the nodes recorded since the last wait; ``None`` if there are many, or some are unknown."""
        if self._since is None or taken != self._taken or len(self._since) + len(pending) > MAX_BETWEEN:
            return None
        return [*self._since, *pending]

    def _learn(self, place: Place, slot: Slot, pending: Sequence[Node], taken: int) -> None:
        if self._place is None or self._is_paused or place in self._visited:
            return
        between = self._between(pending, taken)
        if between is None:
            return
        habit = self._habits.get(self._place)
        if habit is None:
            if len(self._habits) >= MAX_PLACES:
                self._habits.clear()
            habit = self._habits[self._place] = _Habit()
        found = None
        if all(is_harmless(node.signature) for node in between):
            needed = compress(between, needed_for(between, (slot,)))
            found = _continuation(list(needed), slot, self._tail, place)
        if found is not None:
            habit.add(found)
        elif not habit.chain:
            habit.rest()

    def _made(self, first: _Habit) -> list[ForeseenValue]:
        """Foresee the waits that follow a wait, and those that follow these."""
        made: list[ForeseenValue] = []
        visited = set(self._visited)
        waits = [(first, self._tail)]
        while waits:
            habit, tail = waits.pop()
            for continuation in habit.chain:
                if len(made) == MAX_CHAIN:
                    return made
                if continuation.place in visited:
                    continue
                expected = self._repeated(continuation, habit, tail)
                if expected is None:
                    break
                visited.add(continuation.place)
                made.append(expected)
                following = self._habits.get(continuation.place)
                if following is not None and not following.left:
                    waits.append((following, (*tail, *expected.nodes)))
        return made

    def _repeated(self, continuation: _Continuation, habit: _Habit, tail: Sequence[Node]) -> ForeseenValue | None:
        """Make the operations of a continuation, on the values that there are now."""
        nodes: list[Node] = []
        results: list[tuple[Slot, TensorSpec | None]] = []
        for step in continuation.steps:
            operands = []
            for source, spec in zip(step.operands, step.signature.operands, strict=True):
                found = results[source[1]] if not source[0] else _resolved(source, tail)
                if found is None or found[1] is not spec:
                    return None
                operands.append(found[0])
            outputs = []
            for alias, made in zip(step.signature.aliases, step.signature.results, strict=True):
                number = next(self._numbers)
                outputs.append(Slot(number, operands[alias].storage if alias >= 0 else number))
                results.append((outputs[-1], made))
            nodes.append(Node(step.signature, tuple(operands), tuple(outputs), step.numbers))
        return ForeseenValue(nodes, *results[continuation.wanted], continuation, habit)


def _continuation(needed: Sequence[Node], slot: Slot, tail: Sequence[Node], place: Place) -> _Continuation | None:
    """Describe operations so that they can be repeated later; ``None`` if they must not be."""
    if not needed or not all(is_repeatable(node.signature) for node in needed):
        return None
    if sum(moved_bytes(node.signature) for node in needed) > MAX_MOVED_BYTES:
        return None
    sources: dict[int, Source] = {}
    for distance, node in enumerate(reversed(tail), start=1):
        for position, known in enumerate(node.outputs):
            sources.setdefault(known.number, (distance, position))
        for position, known in enumerate(node.inputs):
            sources.setdefault(known.number, (distance, -1 - position))
    steps = []
    made: list[Slot] = []
    for node in needed:
        operands = tuple(sources.get(operand.number) for operand in node.inputs)
        if None in operands or len(node.inputs) != len(node.signature.operands):
            return None
        steps.append(_Step(node.signature, operands, node.numbers))  # type: ignore[arg-type]  # none is None
        for result in node.outputs:
            sources[result.number] = 0, len(made)
            made.append(result)
    wanted = next((index for index, result in enumerate(made) if result.number == slot.number), None)
    spec = None if wanted is None else [spec for node in needed for spec in node.signature.results][wanted]
    if wanted is None or (spec is not None and spec.size_bytes > MAX_BYTES):
        return None
    return _Continuation(tuple(steps), wanted, place)


def _resolved(source: Source, tail: Sequence[Node]) -> tuple[Slot, TensorSpec | None] | None:
    """Find a value among the operations before a wait: it is alive, since one of them uses or makes it."""
    distance, position = source
    if distance > len(tail):
        return None
    node = tail[-distance]
    slots, specs = (node.outputs, node.signature.results) if position >= 0 else (node.inputs, node.signature.operands)
    position = position if position >= 0 else -1 - position
    if position >= min(len(slots), len(specs)):
        return None
    slot = slots[position]
    changed = any(slot.number == other.inputs[index].number and not is_harmless(other.signature)
                  for other in tail[-distance:] for index in other.signature.writes)
    return None if changed else (slot, specs[position])


def _is_same(expected: ForeseenValue, needed: Sequence[Node], slot: Slot) -> bool:
    """Whether the program recorded just the operations that were foreseen, on the same values."""
    if len(needed) != len(expected.nodes):
        return False
    names: dict[int, int] = {}
    for ours, theirs in zip(expected.nodes, needed, strict=True):
        if not _is_alike(ours.signature, theirs.signature) or repr(ours.numbers) != repr(theirs.numbers):
            return False
        if [names.get(operand.number, operand.number) for operand in ours.inputs] != [
                operand.number for operand in theirs.inputs]:
            return False
        names.update(zip((one.number for one in ours.outputs), (one.number for one in theirs.outputs), strict=True))
    return names[expected.wanted.number] == slot.number


def _is_alike(one: Signature, other: Signature) -> bool:
    """Whether two signatures are equal: those of operations that return Python values are made for each call."""
    return one is other or (one.template_number == other.template_number and one.operands == other.operands
                            and one.results == other.results and one.aliases == other.aliases)
