"""What the workers of a tenant use together: shared memory in which each of them writes its own amounts.

A limit of a tenant applies to the sessions of all its workers. A worker that wants more first writes its new amount,
and reads those of the others; if that is too much, it writes its old amount back. So two workers that want
the last part at once may both be refused, and never both get it. A worker that an attacker has taken over can write
anything there, which harms the sessions of its own tenant only: it could use up the limits as well.
"""

from __future__ import annotations

import enum
import mmap
import os
from typing import Protocol, Self

from djinn_plugins.server.shared_memory import shared_memory
from djinn_plugins.server.tenant_limits import MAX_WORKERS

__all__ = ("Alone", "Amount", "OthersUse", "TenantUse", "WorkerUse")

_BYTES = 8
_COUNT = 0
"""Position of the number of places that are read; the amounts follow, by kind and then by worker."""
_MOST = 2**62


class Amount(enum.IntEnum):
    """Kinds of amounts."""

    SESSIONS = 0
    HANDLES = 1
    INFLIGHT_BYTES = 2
    QUEUED = 3
    NAMES = 4
    HELD_BYTES = 5
    WAIT_NS = 6


class OthersUse(Protocol):
    """The amounts of a tenant's workers, as one of them sees them.

    Concurrency:
        Any thread.
    """

    def put(self, amount: Amount, value: int) -> None:
        """Publish an own amount."""

    def others(self, amount: Amount) -> int:
        """Return the sum of the other workers' amounts."""

    def most_of_others(self, amount: Amount) -> int:
        """Return the largest of the other workers' amounts."""


class Alone:
    """The only worker of a tenant; see `OthersUse`."""

    def put(self, amount: Amount, value: int) -> None:
        """Do nothing: no other worker reads the amount."""

    def others(self, amount: Amount) -> int:
        """Return 0."""
        return 0

    def most_of_others(self, amount: Amount) -> int:
        """Return 0."""
        return 0


class TenantUse:
    """The gateway's end.

    Attributes:
        descriptor: The memory, for workers; owned by this object.

    Raises:
        OSError: The memory cannot be allocated.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        size = _BYTES * (1 + len(Amount) * MAX_WORKERS)
        self.descriptor = shared_memory("djinn-tenant", size)
        self._cells = memoryview(mmap.mmap(self.descriptor, size)).cast("q")
        self._taken: set[int] = set()

    def take(self) -> int:
        """Return a worker's place, which is empty."""
        place = next(place for place in range(MAX_WORKERS) if place not in self._taken)
        self._taken.add(place)
        self._clear(place)
        return place

    def free(self, place: int) -> None:
        """Take the place of a worker that has ended back: it uses nothing more."""
        self._taken.discard(place)
        self._clear(place)

    @property
    def is_empty(self) -> bool:
        """Whether no worker has a place."""
        return not self._taken

    def _clear(self, place: int) -> None:
        for amount in Amount:
            self._cells[1 + amount * MAX_WORKERS + place] = 0
        self._cells[_COUNT] = max(self._taken, default=-1) + 1

    def __del__(self) -> None:
        os.close(self.descriptor)


class WorkerUse:
    """A worker's end; see `OthersUse`.

    Args:
        descriptor: The memory; may be closed afterwards.
        place: The worker's place.
    """

    def __init__(self, descriptor: int, place: int) -> None:
        self._cells = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        self._place = place

    @classmethod
    def of(cls, descriptor: int, place: int) -> Self:
        """Map the memory, and close its descriptor."""
        try:
            return cls(descriptor, place)
        finally:
            os.close(descriptor)

    def put(self, amount: Amount, value: int) -> None:
        """Publish an own amount."""
        self._cells[1 + amount * MAX_WORKERS + self._place] = min(max(0, value), _MOST)

    def others(self, amount: Amount) -> int:
        """Return the sum of the other workers' amounts."""
        return sum(self._of_others(amount))

    def most_of_others(self, amount: Amount) -> int:
        """Return the largest of the other workers' amounts."""
        return max(self._of_others(amount), default=0)

    def _of_others(self, amount: Amount) -> list[int]:
        first, count = 1 + amount * MAX_WORKERS, min(max(0, self._cells[_COUNT]), MAX_WORKERS)
        found = self._cells[first:first + count].tolist()
        return [max(0, value) for place, value in enumerate(found) if place != self._place]
