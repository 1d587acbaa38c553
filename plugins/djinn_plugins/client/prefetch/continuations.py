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

from djinn.ir.tape import Node, needed_for
from djinn.ir.value import Slot
from djinn_plugins.client.prefetch.history import History, Tail
from djinn_plugins.client.prefetch.repetition import Continuation, Repeated, described, is_same, learned, repeated
from djinn_plugins.client.prefetch.selecting import index_read_by
from djinn_plugins.common.operators.harmless import are_harmless

__all__ = ("Continuations", "ForeseenValue", "Place", "place_of")

MAX_BETWEEN = 256
"""Operations between a wait and what follows it."""
MAX_CHAIN = 8
"""Waits that are foreseen at one."""
NEW_CREDIT = 4
"""How often in a row a value may be foreseen in vain before it was useful."""
MAX_CREDIT = 16
"""How often in a row it may be after that."""
MAX_PLACES = 1024
MAX_PAUSE = 256
"""How many waits at a place pass, at most, until it is tried again after it was in vain."""

_Position = tuple[int | None, int | None, int | None, int | None]
Place = tuple[ref[CodeType], _Position, ref[CodeType] | None, _Position | None]
"""Where a program waits: code, and position in its text, of the innermost caller outside djinn and of its caller."""


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


@attrs.define(eq=False)
class _Pause:
    """How many waits at a place pass until something is tried again, and how many of them are left."""

    length: int = 0
    left: int = 0

    def rest(self) -> None:
        """Try it less often."""
        self.length = self.left = min(2 * self.length + 1, MAX_PAUSE)

    def passes(self) -> bool:
        """Whether a wait is one of those that pass."""
        passes = self.left > 0
        self.left -= passes
        return passes


@attrs.define(eq=False)
class _Following:
    """A wait that followed another one.

    Attributes:
        continuation: What led to it.
        credit: How often in a row it may be foreseen in vain.
    """

    continuation: Continuation
    credit: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.credit = NEW_CREDIT if self.continuation.is_cheap else 1

    def used(self) -> None:
        """Allow it to be wrong some more: a program may ask for a value only in some of its rounds."""
        if self.continuation.is_cheap:
            self.credit = min(self.credit + NEW_CREDIT, MAX_CREDIT)
        else:
            self.credit = 1


@attrs.define(eq=False)
class _Habit:
    """The waits that followed a wait at one place.

    Attributes:
        chain: The waits that followed, in order.
        foreseeing: How often foreseeing them is left out.
        learning: How often learning what follows is left out.
    """

    chain: list[_Following] = attrs.field(factory=list)
    foreseeing: _Pause = attrs.field(factory=_Pause)
    learning: _Pause = attrs.field(factory=_Pause)

    def add(self, found: Continuation) -> None:
        """Expect another wait after those that are expected."""
        self.chain = [*(known for known in self.chain if known.continuation.place != found.place), _Following(found)]

    def unused(self, following: _Following) -> None:
        """Expect a wait no longer that did not follow, unless it often does."""
        following.credit -= 1
        if following.credit < 0:
            self.chain = [known for known in self.chain if known is not following]
            if not self.chain:
                self.foreseeing.rest()


@attrs.define(eq=False)
class ForeseenValue:
    """A value that is computed before the program asks for it.

    Attributes:
        operations: The operations that compute it.
        following: What is expected.
        habit: The habit that this belongs to.
        value: The value, once it is here.
    """

    operations: Repeated
    following: _Following
    habit: _Habit
    value: Any = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All operations, in order."""
        return self.operations.run

    @property
    def size_bytes(self) -> int:
        """Size of the value; none for a Python value."""
        spec = self.operations.spec
        return spec.size_bytes if spec is not None else 0


class Continuations:
    """Foresees waits, and answers them.

    Args:
        numbers: Gives numbers to values.
        history: What the program has recorded.

    Attributes:
        fetched: How many values were fetched before they were asked for.
        fetched_bytes: Their size.
        unused: How many of them were dropped.
        unused_bytes: Their size.
    """

    def __init__(self, numbers: Iterator[int], history: History) -> None:
        self._history = history
        self.fetched = self.fetched_bytes = self.unused = self.unused_bytes = 0
        self._numbers = numbers
        self._habits: dict[Place, _Habit] = {}
        self._ahead: list[ForeseenValue] = []
        self._place: Place | None = None
        """Where the program waited at last."""
        self._answer: int | None = None
        """The number that it was given then. A tensor is not kept: the program may hang a graph on it."""
        self._visited: set[Place] = set()
        self._tail = Tail()
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
        if between is None or not are_harmless(between):
            self.drop()
            return None
        needed = list(compress(between, needed_for(between, (slot,))))
        for position, expected in enumerate(self._ahead):
            if is_same(expected.operations, needed, slot):
                self._count_unused(self._ahead[:position])
                del self._ahead[:position + 1]
                self._visited |= {place, expected.following.continuation.place}
                expected.following.used()
                expected.habit.foreseeing.length = 0
                return expected
        return None

    def sent(self, pending: Sequence[Node], before: int, taken: int) -> None:
        """Note that everything pending was sent without a wait."""
        between = self._between(pending, before)
        if between is None or taken - before != len(pending):
            self.forget()
        else:
            self._since, self._taken = between, taken

    def foresee(self, place: Place, slot: Slot, pending: Sequence[Node], taken: int, *,
                is_apart: bool) -> list[ForeseenValue]:
        """Learn from a wait that was not foreseen, and foresee the waits after it.

        Args:
            place: Where the program waits.
            slot: The requested value.
            pending: The tape; the last nodes of the history.
            taken: How many nodes were taken off it so far.
            is_apart: Whether the foreseen operations run after the tape, and after dead values were freed.
        """
        self.drop()
        self._learn(place, slot, pending, taken)
        end = self._history.end
        self._tail = Tail(end, end if is_apart else self._history.sent, self._tail.end)
        self._place, self._visited = place, {place}
        habit = self._habits.get(place)
        self._is_paused = habit is not None and habit.foreseeing.passes()
        asked = None if is_apart or not pending else index_read_by(pending[-1], slot)
        return [] if habit is None or self._is_paused else self._made(habit, asked)

    def arrived(self, answer: Any, expected: Sequence[ForeseenValue], values: Sequence[Any], taken: int, *,
                is_exact: bool) -> None:
        """Take the values that came with the answer to a wait.

        Args:
            answer: The answer.
            expected: The foreseen values.
            values: The values.
            taken: How many nodes were taken off the tape so far.
            is_exact: Whether nothing was recorded, while it was sent, that may have changed them since.
        """
        self._since, self._taken, self._answer = [], taken, answer if type(answer) is int else None
        for one, value in zip(expected, values, strict=True):
            one.value, one.operations = value, one.operations.after(answer)
            self.fetched += 1
            self.fetched_bytes += one.size_bytes
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

    def _count_unused(self, dropped: Sequence[ForeseenValue]) -> None:
        for one in dropped:
            self.unused += 1
            self.unused_bytes += one.size_bytes
            one.habit.unused(one.following)

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
        if habit.learning.passes():
            return
        found = None
        if are_harmless(between):
            needed = compress(between, needed_for(between, (slot,)))
            found = described(list(needed), slot, self._tail, self._history, place)
        if found is None:
            habit.learning.rest()
        else:
            habit.learning.length = 0
            before = [known.continuation for known in habit.chain if known.continuation.place == place]
            habit.add(learned(found, before[0], self._answer) if before else found)

    def _made(self, first: _Habit, asked: Slot | None) -> list[ForeseenValue]:
        """Foresee the waits that follow a wait, and those that follow these."""
        made: list[ForeseenValue] = []
        visited = set(self._visited)
        waits = [(first, self._tail)]
        while waits:
            habit, tail = waits.pop()
            for following in habit.chain:
                if len(made) == MAX_CHAIN:
                    return made
                continuation = following.continuation
                if continuation.place in visited:
                    continue
                operations = repeated(continuation, tail, self._history, self._numbers,
                                      asked if habit is first else None)
                if operations is None:
                    # Its operands are gone, as those of a loop that has ended; the waits of another loop may follow.
                    habit.unused(following)
                    continue
                visited.add(continuation.place)
                made.append(ForeseenValue(operations, following, habit))
                further = self._habits.get(continuation.place)
                if further is not None and not further.foreseeing.left:
                    waits.append((further, tail.followed_by(operations.nodes)))
        return made
