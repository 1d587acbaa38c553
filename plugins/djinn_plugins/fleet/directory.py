"""Where values are: one home executor per storage, and copies of single values on others."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node


@attrs.define(eq=False)
class DirectoryEntry:
    """Metadata of one value that an executor holds."""

    storage: int
    size_bytes: int = 0
    view: Node | None = None
    """The operation that creates it as a view of another value, if there is one."""
    copies: set[int] = attrs.field(factory=set)
    """Executors, other than the storage's home, that hold its current contents."""


class Directory:
    """Tracks where the values of a fleet are.

    All values of a storage are on its home executor, where they share memory as in eager mode. Copies on other
    executors are of single values and are only read. A write to the storage invalidates them.

    Attributes:
        homes: The home executor of each storage, by the storage's number.
        held_bytes: Bytes of storages and copies, by executor.

    Concurrency:
        The caller holds the session's lock.
    """

    def __init__(self, executors: int) -> None:
        self.homes: dict[int, int] = {}
        self.held_bytes = [0] * executors
        self._values: dict[int, DirectoryEntry] = {}
        self._members: dict[int, set[int]] = {}
        self._sizes: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def __len__(self) -> int:
        return len(self._values)

    def find(self, number: int) -> DirectoryEntry | None:
        """Return the metadata of a value, if an executor holds it."""
        return self._values.get(number)

    def home_of(self, number: int) -> int | None:
        """Return the home of a value's storage."""
        held = self._values.get(number)
        return None if held is None else self.homes[held.storage]

    def is_at(self, number: int, executor: int) -> bool:
        """Whether an executor holds the current contents of a value."""
        held = self._values.get(number)
        return held is not None and (self.homes[held.storage] == executor or executor in held.copies)

    def members_of(self, storage: int) -> Iterator[tuple[int, DirectoryEntry]]:
        """Iterate over the live values of a storage."""
        for number in self._members.get(storage, ()):
            yield number, self._values[number]

    def add(self, number: int, executor: int, spec: TensorSpec | None, view: Node | None = None,
            base: int | None = None) -> None:
        """Record that an executor creates a value: in a new storage, or in the storage of its base.

        Slots do not say which: they contain the last storage of a value, which ``set_`` may have changed since.
        """
        known = None if base is None else self._values.get(base)
        storage = number if known is None else known.storage
        if storage not in self.homes:
            self.homes[storage] = executor
            self._sizes[storage] = 0 if spec is None else spec.reach_bytes
            self.held_bytes[executor] += self._sizes[storage]
        self._values[number] = DirectoryEntry(storage, 0 if spec is None else spec.size_bytes, view)
        self._members.setdefault(storage, set()).add(number)

    def rehouse(self, number: int, storage: int) -> None:
        """Record that a value has moved to another known storage, and is present on that storage's home."""
        # Those made of it stay in the storage that it leaves.
        self.forget_views(number)
        held = self._values[number]
        if self.homes[storage] in held.copies:
            self.drop_copy(number, self.homes[storage])
        self._leave(number, held)
        held.storage = storage
        self._members.setdefault(storage, set()).add(number)

    def rehome(self, storage: int, executor: int) -> int:
        """Record that a storage has moved with all its values.

        Returns:
            How many of the values the executor had no copy of.
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
        """Record that a value's size or strides have changed, so that repeating its operation no longer reproduces it.

        The same applies to values that were made as views of it.
        """
        storage = self._values[number].storage
        for other, held in self.members_of(storage):
            if other == number or (held.view is not None and held.view.inputs[0].number == number):
                held.view = None

    def copied(self, number: int, executor: int) -> None:
        """Record that an executor has a copy of a value."""
        held = self._values[number]
        if executor not in held.copies:
            held.copies.add(executor)
            self.held_bytes[executor] += held.size_bytes

    def drop_copy(self, number: int, executor: int) -> None:
        """Record that an executor no longer has a copy."""
        held = self._values[number]
        held.copies.remove(executor)
        self.held_bytes[executor] -= held.size_bytes

    def drop(self, number: int) -> list[int]:
        """Record that a value is no longer referenced.

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

    def _leave(self, number: int, held: DirectoryEntry) -> None:
        members = self._members[held.storage]
        members.discard(number)
        if not members:
            home = self.homes.pop(held.storage)
            self.held_bytes[home] -= self._sizes.pop(held.storage)
            del self._members[held.storage]
