"""Where values are: one home for each storage, and copies of single values elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot


@attrs.define(eq=False)
class Held:
    """What is known of one value that an executor holds."""

    storage: int
    size_bytes: int = 0
    view: Node | None = None
    """The operation that makes it of another value without copying, if one does."""
    copies: set[int] = attrs.field(factory=set)
    """Executors beside the storage's home that hold its present contents."""


class Whereabouts:
    """The books of a fleet.

    All values of a storage are at its home, where they share memory as in eager. Copies elsewhere are of single values
    and are only read; what writes a storage makes them obsolete.

    Attributes:
        homes: The executor where a storage is at home, by the storage's number.
        held_bytes: Bytes of storages and copies, by executor.

    Concurrency:
        For the holder of the session's lock.
    """

    def __init__(self, executors: int) -> None:
        self.homes: dict[int, int] = {}
        self.held_bytes = [0] * executors
        self._values: dict[int, Held] = {}
        self._members: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def __len__(self) -> int:
        return len(self._values)

    def find(self, number: int) -> Held | None:
        """Return what is known of a value, if any executor holds it."""
        return self._values.get(number)

    def home_of(self, number: int) -> int | None:
        """Return the home of a value's storage."""
        held = self._values.get(number)
        return None if held is None else self.homes[held.storage]

    def is_at(self, number: int, executor: int) -> bool:
        """Whether an executor holds the present contents of a value."""
        held = self._values.get(number)
        return held is not None and (self.homes[held.storage] == executor or executor in held.copies)

    def members_of(self, storage: int) -> Iterator[tuple[int, Held]]:
        """Iterate over the values of a storage that somebody still names."""
        for number in self._members.get(storage, ()):
            yield number, self._values[number]

    def add(self, slot: Slot, executor: int, spec: TensorSpec | None, view: Node | None = None) -> None:
        """Learn that an executor makes a value; the first value of a storage makes that executor its home."""
        storage = slot.storage
        if storage not in self.homes:
            self.homes[storage] = executor
            self._sizes[storage] = 0 if spec is None else spec.reach_bytes
            self.held_bytes[executor] += self._sizes[storage]
        self._values[slot.number] = Held(storage, 0 if spec is None else spec.size_bytes, view)
        self._members.setdefault(storage, set()).add(slot.number)

    def rehouse(self, slot: Slot) -> None:
        """Learn that a value has been given another storage, that of a value known here, and is at its home."""
        held = self._values[slot.number]
        if self.homes[slot.storage] in held.copies:
            self.drop_copy(slot.number, self.homes[slot.storage])
        self._leave(slot.number, held)
        held.storage, held.view = slot.storage, None
        self._members.setdefault(slot.storage, set()).add(slot.number)

    def rehome(self, storage: int, executor: int) -> int:
        """Learn that a storage with all its values has moved.

        Returns:
            How many of them the executor had no copy of.
        """
        home = self.homes[storage]
        self.held_bytes[home] -= self._sizes[storage]
        self.held_bytes[executor] += self._sizes[storage]
        self.homes[storage] = executor
        made = 0
        for number, held in list(self.members_of(storage)):
            if executor in held.copies:
                self.drop_copy(number, executor)
            else:
                made += 1
        return made

    def forget_views(self, number: int) -> None:
        """Learn that a value has another size or other strides: it is no longer what its operation makes.

        Nor are other values views of what it is now; how they were made no longer says what they are.
        """
        storage = self._values[number].storage
        for other, held in self.members_of(storage):
            if other == number or (held.view is not None and held.view.inputs[0].number == number):
                held.view = None

    def copied(self, number: int, executor: int) -> None:
        """Learn that an executor has a copy of a value."""
        held = self._values[number]
        if executor not in held.copies:
            held.copies.add(executor)
            self.held_bytes[executor] += held.size_bytes

    def drop_copy(self, number: int, executor: int) -> None:
        """Learn that an executor no longer has a copy."""
        held = self._values[number]
        held.copies.remove(executor)
        self.held_bytes[executor] -= held.size_bytes

    def drop(self, number: int) -> list[int]:
        """Learn that nobody names a value any more.

        Returns:
            The executors that hold it.
        """
        held = self._values.pop(number, None)
        if held is None:
            return []
        executors = [self.homes[held.storage], *sorted(held.copies)]
        for executor in held.copies:
            self.held_bytes[executor] -= held.size_bytes
        self._leave(number, held)
        return executors

    def _leave(self, number: int, held: Held) -> None:
        members = self._members[held.storage]
        members.discard(number)
        if not members:
            home = self.homes.pop(held.storage)
            self.held_bytes[home] -= self._sizes.pop(held.storage)
            del self._members[held.storage]
