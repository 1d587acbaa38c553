"""Bookkeeping of storages: location, role, and how each can be restored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

import attrs
import torch

from djinn_plugins.common.calls.handle_table import ValueTable
from djinn_plugins.common.kinds.executor import CompiledProgram
from djinn_plugins.common.memory.kept_memory import is_mapped
from djinn_plugins.common.memory.shared_values import unshare
from djinn_plugins.executor.memory.accounts import Accounts
from djinn_plugins.executor.memory.roles import Role

_NO_STORAGE = torch.UntypedStorage(0)


class State(Enum):
    """Where the bytes of a storage are."""

    HERE = auto()
    """On the device."""
    MOVED = auto()
    """In host memory."""
    RELOADABLE = auto()
    """In the upload that they came from, which is kept."""
    DROPPED = auto()
    """Nowhere; they will be recomputed."""


@attrs.define(eq=False)
class Recipe:
    """A pure run with its inputs and outputs, which can be repeated.

    Attributes:
        program: The program.
        numbers: Its numbers.
        inputs: Its inputs: plain results, and weak references to tensors, so that they are not kept alive unless
            needed.
        read: The storages of the inputs, with the number of writes to each when the program ran.
        made: The storages of its results, by position.
        wanted_bytes: Memory that it needed in addition to its inputs.
        duration_s: How long it took.
        held: Its inputs, while a dropped result needs them.
    """

    program: CompiledProgram
    numbers: Sequence[Any]
    inputs: Sequence[Any]
    read: Sequence[tuple[ManagedStorage, int]]
    wanted_bytes: int
    duration_s: float
    made: dict[int, ManagedStorage] = attrs.field(factory=dict)
    held: list[Any] | None = None

    @property
    def is_good(self) -> bool:
        """Whether its inputs exist, are unchanged, and need not be recomputed first."""
        return all(place.is_named and place.writes == writes and place.state is not State.DROPPED
                   for place, writes in self.read) and all(
            not isinstance(value, weakref.ref) or value() is not None for value in self.inputs)

    @property
    def needed_bytes(self) -> int:
        """Memory that repeating it takes: while results are copied to their storages, they exist twice."""
        return self.wanted_bytes + sum(
            place.size_bytes for place in (*(place for place, _ in self.read), *self.made.values()))

    def hold(self) -> None:
        """Keep its inputs until they are released."""
        self.held = [value() if isinstance(value, weakref.ref) else value for value in self.inputs]


@attrs.define(eq=False)
class ManagedStorage:
    """One storage in the bookkeeping.

    Attributes:
        storage: The storage. While its bytes are elsewhere it is empty; tensors on it remain valid.
        size_bytes: Its size, while present or after restoration; 0 for a mapped file, until it is written.
        mapped_bytes: Size of the mapped file whose memory it shares with others; 0 once it is written.
        role: Its role.
        used_at: When it was last used.
        state: Where its bytes are.
        host: Its bytes while they are moved; or its upload, while that is kept and the storage was never written.
        recipe: How to recompute it, if that is possible.
        handles: How many values lie in it.
        writes: How often it was written, or may have been.
        growths: How many times in a row it has grown from its predecessor.
        is_told: Whether the client has stated its role.
        dependents: Dropped storages whose recomputation needs it.
    """

    storage: torch.UntypedStorage
    size_bytes: int
    role: Role
    used_at: float
    state: State = State.HERE
    host: torch.Tensor | None = None
    recipe: Recipe | None = None
    handles: int = 0
    writes: int = 0
    growths: int = 0
    is_told: bool = False
    dependents: set[ManagedStorage] = attrs.field(factory=set)
    mapped_bytes: int = 0

    @property
    def is_named(self) -> bool:
        """Whether values lie in it."""
        return self.handles > 0

    @property
    def can_be_dropped(self) -> bool:
        """Whether it can be recomputed."""
        return self.recipe is not None and not self.dependents and self.recipe.is_good

    @property
    def can_be_reloaded(self) -> bool:
        """Whether its upload is kept."""
        return self.state is State.HERE and self.host is not None


class Places(ValueTable):
    """Values by handle, and their storages; see `djinn_plugins.common.calls.handle_table.ValueTable`.

    Args:
        accounts: Accounting for all sessions.
        clock: Returns the time in seconds.

    Attributes:
        held_bytes: Bytes of the storages, wherever they are; what is shared is not counted.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, accounts: Accounts, clock: Callable[[], float]) -> None:
        super().__init__()
        self._accounts = accounts
        self._clock = clock
        self._places: dict[int, ManagedStorage] = {}
        """By storage."""
        self._of: dict[int, ManagedStorage] = {}
        """By handle."""

    @property
    def own_bytes(self) -> int:
        """As `held_bytes`."""
        return self.held_bytes

    @property
    def entries(self) -> Iterable[ManagedStorage]:
        """All storages."""
        return self._places.values()

    def at(self, handle: int) -> ManagedStorage | None:
        """Return the storage of a value; ``None`` if the value is not a tensor."""
        return self._of.get(handle)

    def of(self, value: Any) -> ManagedStorage | None:
        """Return the bookkeeping entry of a tensor's storage, if there is one."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        return self.holding(value.untyped_storage())

    def holding(self, storage: torch.UntypedStorage) -> ManagedStorage | None:
        """Return the bookkeeping entry of a storage, if there is one."""
        return self._places.get(storage._cdata)

    def put(self, handle: int, value: Any) -> None:
        """Store a value under a handle, replacing the previous one."""
        before = self._of.pop(handle, None)
        self._values[handle] = value
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            place = self._places.get(value.untyped_storage()._cdata) or self._entered(value)
            place.handles += 1
            self._of[handle] = place
        if before is not None:
            self._unname(before)

    def drop(self, handles: Iterable[int]) -> None:
        """Drop values."""
        for handle in handles:
            self._values.pop(handle, None)
            place = self._of.pop(handle, None)
            if place is not None:
                self._unname(place)

    def enter_new(self, value: Any) -> ManagedStorage | None:
        """Count the storage of a value that will be put, and return it; ``None`` if it is counted already."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or self.of(value) is not None:
            return None
        return self._entered(value)

    def leave_unused(self, places: Iterable[ManagedStorage]) -> None:
        """Remove those of some storages in which no value was put."""
        for place in places:
            self._bury(place)

    def _entered(self, value: torch.Tensor) -> ManagedStorage:
        # Evicting memory that others use would free none.
        unshare(value)
        storage = value.untyped_storage()
        mapped_bytes = storage.nbytes() if is_mapped(value) else 0
        place = self._places[storage._cdata] = ManagedStorage(
            storage, storage.nbytes() - mapped_bytes, Role.UNKNOWN, self._clock(), mapped_bytes=mapped_bytes)
        self.held_bytes += place.size_bytes
        self.shared_bytes += mapped_bytes
        self._accounts.came(place.role, place.size_bytes)
        return place

    def own(self, place: ManagedStorage) -> None:
        """Count a storage that is about to be written, so that it will not share its memory any more."""
        size_bytes, place.mapped_bytes = place.mapped_bytes, 0
        place.size_bytes += size_bytes
        self.shared_bytes -= size_bytes
        self.held_bytes += size_bytes
        self._accounts.came(place.role, size_bytes)

    def sharing(self, tensor: torch.Tensor) -> Sequence[int]:
        """List the handles of the values that share a tensor's storage."""
        place = self.of(tensor)
        return [handle for handle, other in self._of.items() if other is place]

    def storage_bytes(self, handles: Iterable[int]) -> int:
        """Return the bytes of the storages that values lie in, wherever these are, each storage counted once."""
        return sum(place.size_bytes for place in {self._of[handle] for handle in handles if handle in self._of})

    def added_bytes(self, values: Iterable[Any]) -> int:
        """Return by how much `held_bytes` would grow if these values were put, too."""
        storages = [value.untyped_storage() for value in values
                    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_mapped(value)]
        return sum({storage._cdata: storage.nbytes() for storage in storages
                    if storage._cdata not in self._places}.values())

    def clear(self) -> None:
        """Drop everything."""
        self.drop(list(self._values))

    def grant(self, place: ManagedStorage, role: Role) -> None:
        """Set the role of a storage."""
        if place.role is not role and not place.is_told:
            self._accounts.recast(place.role, role, place.size_bytes, is_here=place.state is State.HERE)
            place.role = role

    def state(self, place: ManagedStorage, role: Role) -> None:
        """Set the role of a storage that the client has stated; no guess changes it."""
        place.is_told = False
        self.grant(place, role)
        place.is_told = True

    def forget_recipe(self, place: ManagedStorage) -> None:
        """Drop the recipe of a storage that is on the device or on the host, so that it no longer needs one."""
        recipe, place.recipe = place.recipe, None
        if recipe is not None and place.state is State.DROPPED:
            self.unhold(place, recipe)

    def unhold(self, place: ManagedStorage, recipe: Recipe) -> None:
        """Record that a storage does not need its recipe's inputs, at least for now."""
        for read, _ in recipe.read:
            read.dependents.discard(place)
        if not any(made.state is State.DROPPED and made.recipe is recipe and made is not place
                   for made in recipe.made.values()):
            recipe.held = None
        for read, _ in recipe.read:
            self._bury(read)

    def recount(self) -> None:
        """Update all entries: values may have moved to other storages, and storages may have changed size."""
        for handle, place in list(self._of.items()):
            value = self._values[handle]
            if value.untyped_storage()._cdata != place.storage._cdata:
                self.put(handle, value)
        for place in self._places.values():
            size_bytes = place.storage.nbytes() - place.mapped_bytes
            if place.state is State.HERE and size_bytes != place.size_bytes:
                self._accounts.came(place.role, size_bytes - place.size_bytes)
                self.held_bytes += size_bytes - place.size_bytes
                place.size_bytes = size_bytes

    def _unname(self, place: ManagedStorage) -> None:
        place.handles -= 1
        self._bury(place)

    def _bury(self, place: ManagedStorage) -> None:
        """Remove a storage that no value lies in and no other storage needs."""
        if place.handles or place.dependents or self._places.pop(place.storage._cdata, None) is None:
            return
        self.held_bytes -= place.size_bytes
        self.shared_bytes -= place.mapped_bytes
        if place.state is State.HERE:
            self._accounts.went(place.role, place.size_bytes)
        elif place.state is State.MOVED:
            self._accounts.host_bytes -= place.size_bytes
        place.host = None
        self.forget_recipe(place)
        # Recipes may still refer to this entry; it must not keep the memory alive.
        place.storage = _NO_STORAGE
