"""Values that are fetched with others, so that the client can compute what the program asks for next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from djinn.ir.value import Slot
from djinn_plugins.client.known_values.values import KnownValues
from djinn_plugins.client.wishes import Wishes

__all__ = ("Companions",)

MAX_CANDIDATES = 256
"""Values that are remembered because they could have been fetched."""
MAX_KINDS = 1024
"""Kinds of questions that are remembered."""


class Companions:
    """Chooses which values to fetch with a value.

    Once an integer operand of a fetched value would have saved a later round trip, the next value of that kind is
    fetched together with such operands.

    Args:
        known: What the client knows.
        wishes: Where the values are ordered.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, known: KnownValues, wishes: Wishes) -> None:
        self._known = known
        self._wishes = wishes
        self._candidates: dict[int, tuple[int, ...]] = {}
        """Values that could have been fetched, and with what kind of value."""
        self._useful: set[tuple[int, ...]] = set()

    @contextmanager
    def of(self, slots: Sequence[Slot]) -> Iterator[None]:
        """Let others come with a value that is fetched meanwhile."""
        lacking = [value.slot for value in self._known.lacking(slots[0])] if len(slots) == 1 else []
        if not lacking:
            yield
            return
        kind = self._known.kind_of(slots[0])
        self._note(kind, [slot.number for slot in lacking])
        # What is fetched itself is known then.
        ordered = [slot for slot in lacking if slot.number != slots[0].number] if kind in self._useful else []
        self._wishes.slots = ordered
        try:
            yield
            if len(self._wishes.values) == len(ordered):
                for slot, value in zip(ordered, self._wishes.values, strict=True):
                    self._known.learn(slot, value)
        finally:
            self._wishes.slots, self._wishes.values = [], ()

    def freed(self) -> list[int]:
        """Return the values that were freed unseen."""
        return self._wishes.take_freed()

    def _note(self, kind: tuple[int, ...], numbers: Sequence[int]) -> None:
        if all(number in self._candidates for number in numbers):
            if len(self._useful) >= MAX_KINDS:
                self._useful.clear()
            self._useful.update(self._candidates[number] for number in numbers)
        if len(self._candidates) >= MAX_CANDIDATES:
            self._candidates.clear()
        self._candidates.update((number, kind) for number in numbers if number not in self._candidates)
