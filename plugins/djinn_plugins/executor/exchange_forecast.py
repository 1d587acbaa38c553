"""Predicts commands that exchange values with other sessions, as `djinn_plugins.common.wire.delta` predicts runs.

Each exchange of a loop has a number below zero, by which what follows it is known; programs have numbers from zero. It
is predicted from the earlier ones with the same number: handles and numbers of transfers rise steadily, and a value
that is sent or freed is a certain result of a certain run before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

import attrs

from djinn.wire.messages import GENERATOR_HANDLE, Free, Receive, Run, Send
from djinn_plugins.common.wire.rates import Handles

__all__ = ("Exchange", "ExchangeForecast", "run_of")

Exchange: TypeAlias = Send | Receive | Free
_Place = tuple[int, int]
MAX_EXCHANGES = 256
"""Most exchanges that have numbers at a time."""
MAX_FREED = 16
"""Most values that one of them frees."""


@attrs.define(eq=False)
class _Course:
    """The last of one exchange's commands, and how they continue.

    Attributes:
        last: The last one.
        places: Where the values come from that it sends or frees: runs back from it, and a result.
        numbers: How its transfer, and the handle of a received value, continue.
    """

    last: Exchange
    places: tuple[_Place, ...]
    numbers: Handles


class ExchangeForecast:
    """The exchanges of one session.

    Args:
        place_of: Returns how many runs and exchanges ago a value was made, and which of the results it is.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, place_of: Callable[[int], _Place | None]) -> None:
        self._place_of = place_of
        self._numbers: dict[Hashable, int] = {}
        self._count = 0
        self._courses: dict[int, _Course] = {}
        self._ahead: dict[int, Handles] = {}
        self._received = 0
        """How many values were received since the last run."""

    def ran(self) -> None:
        """Note that a program was requested."""
        self._received = 0

    def number_of(self, command: Exchange) -> int | None:
        """Return the number of a requested exchange; ``None`` if it cannot be predicted."""
        places = self._places_of(command)
        if places is None:
            return None
        if isinstance(command, Receive):
            key: Hashable = command.sender, self._received
            self._received += 1
        else:
            key = type(command), getattr(command, "peer", 0), places
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= MAX_EXCHANGES:
                # The oldest one's number is used again: what followed it will not be as predicted.
                del self._numbers[next(iter(self._numbers))]
            number = self._numbers[key] = -1 - self._count % MAX_EXCHANGES
            self._count += 1
            self._courses[number] = _Course(command, places, Handles.of(_counted(command)))
        return number

    def requested(self, number: int, command: Exchange) -> bool:
        """Learn from a requested exchange; return whether it continues those before."""
        course = self._courses[number]
        counted = _counted(command)
        is_even = counted == course.numbers.expected
        course.numbers = course.numbers.after(counted)
        course.last = command
        return is_even

    def expected(self, number: int, handle_at: Callable[[int, int], int | None]) -> Exchange | None:
        """Return the next exchange of a number, after those that `follow` added.

        Args:
            number: The number.
            handle_at: Returns the handle at a place.

        Returns:
            ``None`` if a value that it sends or frees is unknown.
        """
        course = self._courses.get(number)
        if course is None:
            return None
        counted = self._ahead.get(number, course.numbers).expected
        handles = [handle_at(*place) for place in course.places]
        known = tuple([handle for handle in handles if handle is not None])
        if len(known) < len(handles) or any(count < 0 for count in counted):
            return None
        last = course.last
        if isinstance(last, Free):
            return Free(known)
        if isinstance(last, Send):
            return Send(known[0], last.peer, counted[0])
        return Receive(counted[1], counted[0], last.sender)

    def follow(self, number: int, command: Exchange) -> None:
        """Add an exchange that `expected` has returned."""
        known = self._ahead.get(number) or self._courses[number].numbers
        self._ahead[number] = known.after(_counted(command))

    def clear(self) -> None:
        """Return to the exchanges that were requested."""
        self._ahead.clear()

    def _places_of(self, command: Exchange) -> tuple[_Place, ...] | None:
        if isinstance(command, Receive):
            return None if command.family or command.handle == GENERATOR_HANDLE else ()
        if isinstance(command, Send):
            if command.family or command.handle == GENERATOR_HANDLE:
                return None
            handles: tuple[int, ...] = (command.handle,)
        else:
            handles = command.handles
        if not 0 < len(handles) <= MAX_FREED:
            return None
        places = [self._place_of(handle) for handle in handles]
        found = tuple([place for place in places if place is not None])
        return found if len(found) == len(places) else None


def run_of(number: int, command: Exchange) -> Run:
    """Return what an exchange is remembered as: a run of its number that reads, makes and frees the same values."""
    if isinstance(command, Receive):
        return Run(number, (), [], (command.handle,))
    if isinstance(command, Send):
        return Run(number, (command.handle,), [], ())
    return Run(number, (), [], (), command.handles)


def _counted(command: Exchange) -> tuple[int, ...]:
    """Return the numbers of an exchange that rise."""
    if isinstance(command, Receive):
        return command.transfer, command.handle
    return (command.transfer,) if isinstance(command, Send) else ()
