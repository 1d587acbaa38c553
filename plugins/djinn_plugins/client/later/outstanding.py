"""The values of a session that a program has asked for with `djinn.later`, and that have not arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Tape
from djinn.ir.value import Slot

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("OutstandingValue", "OutstandingValues", "ValueCarrier", "outstanding_of")

MAX_ASKED = 256
"""Most values that are in flight at once."""
MAX_ASKED_BYTES = 64 * 1024
"""Most bytes of them: as much as a connection takes while the client reads nothing. Larger values are waited for."""


class OutstandingValue(Protocol):
    """A value that will arrive."""

    slot: Slot
    """Its name."""
    spec: TensorSpec
    """Its metadata."""

    @property
    def is_settled(self) -> bool:
        """Whether it has arrived, or failed."""

    def arrived(self, tensor: torch.Tensor) -> None:
        """Take the value."""

    def failed(self, error: BaseException) -> None:
        """Take the reason why it will never arrive."""


class ValueCarrier(Protocol):
    """A connection that brings values while the client continues."""

    def ask(self) -> None:
        """Ask for the wanted values."""

    def take_arrived(self) -> None:
        """Take the values that have arrived."""


class OutstandingValues:
    """The values of one session.

    Attributes:
        wanted: Those that have not been asked for.
        has_layer: Whether the plugin is on.
        is_asking: Whether they are fetched while the client continues; if not, the program has to wait for them.
        unheard: A failure that occurred while only a log waited.
        carrier: The connection that brings them, if it can.
        tape: The session's tape.
        fetched: How many arrived while the client continued.

    Concurrency:
        The holder of the session's lock; any thread may append to `wanted`.
    """

    def __init__(self) -> None:
        self.wanted: deque[OutstandingValue] = deque()
        self.has_layer = False
        self.is_asking = False
        self.unheard: Exception | None = None
        self.fetched = 0
        self.carrier: ValueCarrier | None = None
        self.tape: Tape | None = None
        self._asked: dict[int, OutstandingValue] = {}
        self._asked_bytes = 0
        self._refused: list[OutstandingValue] = []
        """Those that cannot come while the client continues: they are too large, or were not computed."""

    def __iter__(self) -> Iterator[OutstandingValue]:
        yield from (*self._asked.values(), *self._refused, *self.wanted)

    @property
    def has_asked(self) -> bool:
        """Whether values are in flight."""
        return bool(self._asked)

    @property
    def refused(self) -> tuple[OutstandingValue, ...]:
        """Those that no connection brings: the program has to wait for them."""
        return tuple(self._refused if self.is_asking else self)

    def ask(self) -> None:
        """Ask for the wanted values; to be called when everything recorded has been sent."""
        if self.carrier is not None:
            self.carrier.ask()

    def take_arrived(self) -> None:
        """Take the values that have arrived."""
        if self.carrier is not None:
            self.carrier.take_arrived()

    def choose(self) -> list[OutstandingValue]:
        """Take the values that can be asked for now, since the operations that make them are or have been sent."""
        assert self.tape is not None
        pending = {slot.number for node in tuple(self.tape.nodes) for slot in node.outputs}
        chosen: list[OutstandingValue] = []
        for _ in range(len(self.wanted)):
            value = self.wanted.popleft()
            size_bytes = value.spec.size_bytes
            if size_bytes > MAX_ASKED_BYTES:
                self._refused.append(value)
            elif (value.slot.number in pending or len(self._asked) >= MAX_ASKED
                  or self._asked_bytes + size_bytes > MAX_ASKED_BYTES):
                self.wanted.append(value)
            else:
                self._asked[value.slot.number] = value
                self._asked_bytes += size_bytes
                chosen.append(value)
        return chosen

    def take(self, number: int) -> OutstandingValue | None:
        """Return the value of that name if it was asked for, and forget it."""
        value = self._asked.pop(number, None)
        if value is not None:
            self._asked_bytes -= value.spec.size_bytes
        return value

    def refuse(self, value: OutstandingValue) -> None:
        """Note that no connection brings a value: the program has to wait for it."""
        self._refused.append(value)

    def drop(self, value: OutstandingValue) -> None:
        """Forget a value: it is here."""
        self.take(value.slot.number)
        self._refused = [other for other in self._refused if other is not value]
        for _ in range(len(self.wanted)):
            other = self.wanted.popleft()
            if other is not value:
                self.wanted.append(other)

    def ask_again(self) -> None:
        """Ask for everything again: a request may not have been sent."""
        self.wanted.extend(self._asked.values())
        self._asked.clear()
        self._asked_bytes = 0


def outstanding_of(session: Session) -> OutstandingValues | None:
    """Return the values of a session; ``None`` if the session was opened without the plugin."""
    found = session.shared(OutstandingValues)
    return found if found.has_layer else None
