"""Values that one layer of a session wants to have added to the next answer that another layer waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from djinn.ir.value import Slot

__all__ = ("Wishes",)


@attrs.define(eq=False)
class Wishes:
    """What should come with the next answer.

    Attributes:
        slots: The values: only operands of the requested value, so that they fail with it or not at all.
        values: They, in the same order, if they came.
        are_refused: Whether nothing may come with the next answer: the program does not wait for the requested values.
        freed: Numbers of values that were freed since a layer last looked at them; ``None`` if no layer does.

    Concurrency:
        The holder of the session's lock.
    """

    slots: list[Slot] = attrs.field(factory=list)
    values: Sequence[Any] = ()
    are_refused: bool = False
    freed: list[int] | None = None

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Let nothing come with an answer meanwhile."""
        self.are_refused = True
        try:
            yield
        finally:
            self.are_refused = False

    def died(self, number: int) -> None:
        """Note that a value is freed, which no layer may ask for any more."""
        if self.freed is not None:
            self.freed.append(number)
            if self.slots:
                self.slots = [slot for slot in self.slots if slot.number != number]

    def take_freed(self) -> list[int]:
        """Return the values that were freed since the last time."""
        freed, self.freed = self.freed or [], []
        return freed
