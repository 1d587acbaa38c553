"""The device memory of a server: chooses what to evict, how, and how to restore it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from time import monotonic
from typing import Any, Protocol, TypeVar

import torch

from djinn.errors import OutOfMemoryError
from djinn.wire.messages import Poisoned
from djinn_plugins.common.failures import is_out_of_memory, with_relief
from djinn_plugins.common.kinds.executor import Executor, SupportsOffload, SupportsOutOfMemoryRetry
from djinn_plugins.common.kinds.memory import SpareData
from djinn_plugins.common.memory.tensor_bytes import whole_of
from djinn_plugins.executor.memory.accounts import Accounts
from djinn_plugins.executor.memory.eviction import EvictionCandidate, in_order, way_out
from djinn_plugins.executor.memory.roles import Gone
from djinn_plugins.executor.memory.storages import ManagedStorage, Places, Recipe, State
from djinn_plugins.executor.memory.tiers import PressureLevel, Tiers

COLD_S = 1.0
"""Storages that were not used for this long may be evicted in advance."""
DECODE_S = 2.0
"""How long after its last KV cache growth a session counts as decoding."""
_T = TypeVar("_T")


class MemoryClient(Protocol):
    """The memory of one session, as seen from the memory that all share."""

    places: Places
    random: Any
    decoded_at: float
    """When one of its KV caches last grew."""

    def drop_ahead(self) -> int:
        """Drop results that no client has requested, and return how many bytes they used."""


class DeviceMemory:
    """The device memory that the sessions of one server share.

    Args:
        executor: Holds the values. If it cannot give memory back, nothing is evicted, and requests beyond the limit
            fail.
        limit_bytes: How much the device may hold.
        host_bytes: How much may be moved to the host, including the uploads kept there; 0 for no limit.
        tiers: Derives the memory pressure from the bytes held.
        spare: The uploads that the host keeps.
        clock: Returns the time in seconds.

    Attributes:
        lock: Held while values are used, moved or computed: one session at a time, as on the device itself.
        accounts: Bytes held, and counts of evictions.

    Concurrency:
        The caller of a method holds the lock, except for `relieve`; any thread may read attributes.
    """

    def __init__(
        self, executor: Executor, limit_bytes: int, *, host_bytes: int = 0, tiers: Tiers | None = None,
        spare: SpareData | None = None, clock: Callable[[], float] = monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.accounts = Accounts()
        self.limit_bytes = limit_bytes
        self.host_limit_bytes = host_bytes
        self.clock = clock
        self._tiers = tiers or Tiers()
        self._spare = spare
        self._memory = executor if isinstance(executor, SupportsOffload) else None
        self._tenants: dict[MemoryClient, int] = {}
        self._count = 0
        self._in_use: frozenset[ManagedStorage] = frozenset()
        self._needed: set[ManagedStorage] = set()
        """Storages that the next operation needs. They may be moved to make room for each other, but not dropped: each
        would have to be computed again, for which the next would be dropped."""
        self._leaving_bytes = 0
        """Bytes about to leave the host. They do not count against its limit, so storages can trade places."""
        if isinstance(executor, SupportsOutOfMemoryRetry):
            executor.relief = self.relieve

    @property
    def tier(self) -> PressureLevel:
        """Current memory pressure."""
        return self._tiers.tier

    def join(self, tenant: MemoryClient) -> None:
        """Add a session."""
        self._count += 1
        self._tenants[tenant] = self._count

    def leave(self, tenant: MemoryClient) -> None:
        """Remove a session that has dropped all its values."""
        self._tenants.pop(tenant, None)

    def use(
        self, tenant: MemoryClient, places: Collection[ManagedStorage], wanted_bytes: int, *,
        written: Collection[ManagedStorage] = (),
    ) -> None:
        """Bring storages to the device and make room; both hold until the next call.

        Args:
            tenant: The session that the storages belong to.
            places: Storages to read or write.
            wanted_bytes: How much room to make.
            written: Which of the storages are about to be written.

        Raises:
            OutOfMemoryError: There is not enough room. Nothing is lost or changed.
        """
        now = self.clock()
        needs = frozenset(places)
        for place in needs:
            place.used_at = now
        # A dropped storage is recomputed from the current contents of its inputs, so it must be restored before one of
        # them is written. For the same reason, no further storage that depends on them may be dropped.
        for place in written:
            place.writes += 1
        again = [dependent for place in written for dependent in place.dependents]
        try:
            self._needed.update(again, needs)
            for place in (*again, *needs):
                if place.state is State.DROPPED:
                    self._compute(tenant, place)
            absent = [place for place in needs if place.state is not State.HERE]
            self._leaving_bytes = sum(place.size_bytes for place in absent if place.state is State.MOVED)
            self._make_room(wanted_bytes + sum(place.size_bytes for place in absent)
                            + sum(place.mapped_bytes for place in written), needs)
        finally:
            self._needed.clear()
            self._leaving_bytes = 0
        self._in_use = needs
        for place in absent:
            self._fill(place)
        for place in written:
            place.host = None
            tenant.places.forget_recipe(place)
            tenant.places.own(place)

    def release(self) -> None:
        """Mark everything as unused."""
        self._in_use = frozenset()

    def fit(self) -> None:
        """Evict storages until the held bytes are within the limit again.

        Raises:
            OutOfMemoryError: That is impossible.
        """
        if self.accounts.held_bytes > self.limit_bytes:
            self._make_room(0, frozenset())

    def breathe(self) -> None:
        """Update the memory pressure after a command, and evict cold storages in advance if it is high."""
        tier = self._tiers.follow(self.accounts.held_bytes, self.limit_bytes)
        if tier is PressureLevel.NORMAL:
            return
        wanted_bytes = self._tiers.relaxed_bytes(self.limit_bytes)
        if self.accounts.ahead_bytes:
            self._drop_ahead(wanted_bytes)
        since = self.clock() - COLD_S
        cold = (candidate for candidate in self._candidates(frozenset())
                if candidate.place.used_at <= since and not candidate.is_active_cache)
        for candidate in in_order(cold, self.limit_bytes):
            if self.accounts.held_bytes < wanted_bytes:
                break
            self._evict(candidate)
        self._tiers.follow(self.accounts.held_bytes, self.limit_bytes)

    def relieve(self) -> bool:
        """Evict everything that is not in use, because the device itself is out of memory.

        Returns:
            Whether anything was evicted.

        Concurrency:
            Any thread, without the lock.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            before = self.accounts.held_bytes
            self._drop_ahead(0)
            for candidate in in_order(self._candidates(self._in_use), self.limit_bytes):
                self._evict(candidate)
            return self.accounts.held_bytes < before
        finally:
            self.lock.release()

    def with_relief(self, action: Callable[[], _T]) -> _T:
        """Run an allocating action; if the device is out of memory, evict storages and run it again."""
        return with_relief(action, self.relieve)

    def evict(self, place: ManagedStorage) -> bool:
        """Evict one storage that is not in use, even if memory is not short; return whether it was possible."""
        return any(self._evict(candidate) for candidate in self._candidates(self._in_use) if candidate.place is place)

    def fits_ahead(self, wanted_bytes: int) -> bool:
        """Whether there is enough room to run a program ahead."""
        return self.tier is PressureLevel.NORMAL and (
            self.accounts.held_bytes + wanted_bytes < self._tiers.relaxed_bytes(self.limit_bytes))

    def no_room(self, wanted_bytes: int, needed_bytes: int) -> OutOfMemoryError:
        """Make the error for a lack of memory.

        Args:
            wanted_bytes: How much room was asked for.
            needed_bytes: How much cannot be evicted meanwhile.
        """
        held, fits_bytes = self.accounts, self.limit_bytes - needed_bytes
        part = 100 * fits_bytes // wanted_bytes if wanted_bytes else 100
        smaller = (f" {fits_bytes} bytes can be made free for it: a batch of {part} % of this one, or less, fits."
                   if 0 < part < 100 else "")
        host = f" of {self.host_limit_bytes}" if self.host_limit_bytes else ""
        return OutOfMemoryError(
            f"{wanted_bytes} bytes are wanted, and the limit is {self.limit_bytes}; the device holds "
            f"{held.described()}, and {held.host_bytes} bytes{host} were moved to the host.{smaller}",
            hint="Let go of tensors, work in smaller pieces, or give the server more with --memory-mib and "
                 "--max-host-mib.")

    def moved_to_host(self, place: ManagedStorage) -> None:
        """Record that only this storage still keeps its upload."""
        if place.state is State.RELOADABLE:
            place.state = State.MOVED
            self.accounts.host_bytes += place.size_bytes
        elif place.state is State.HERE:
            place.host = None

    def _make_room(self, wanted_bytes: int, kept: frozenset[ManagedStorage]) -> None:
        accounts, limit_bytes = self.accounts, self.limit_bytes
        if accounts.held_bytes + wanted_bytes <= limit_bytes:
            return
        needed_bytes = sum(place.size_bytes for place in kept if place.state is State.HERE)
        if needed_bytes + wanted_bytes > limit_bytes:
            # Evicting everything else would not be enough.
            raise self.no_room(wanted_bytes, needed_bytes)
        self._drop_ahead(limit_bytes - wanted_bytes)
        if accounts.held_bytes + wanted_bytes <= limit_bytes:
            return
        for candidate in in_order(self._candidates(kept), limit_bytes):
            self._evict(candidate)
            if accounts.held_bytes + wanted_bytes <= limit_bytes:
                return
        raise self.no_room(wanted_bytes, accounts.held_bytes)

    def _drop_ahead(self, wanted_bytes: int) -> None:
        for tenant in self._tenants:
            if self.accounts.held_bytes <= wanted_bytes:
                return
            if tenant.drop_ahead():
                self.accounts.evicted[Gone.RESULTS_AHEAD] += 1

    def _candidates(self, kept: Collection[ManagedStorage]) -> list[EvictionCandidate]:
        if self._memory is None:
            return []
        since = self.clock() - DECODE_S
        return [EvictionCandidate(place, number, tenant.decoded_at > since)
                for tenant, number in self._tenants.items() for place in tenant.places.entries
                if place.state is State.HERE and place not in kept and self._memory.can_offload(place.storage)]

    def _evict(self, candidate: EvictionCandidate) -> bool:
        """Evict a storage, if possible."""
        place, memory, accounts = candidate.place, self._memory, self.accounts
        way = way_out(place)
        recipe = place.recipe
        can_be_dropped = place.can_be_dropped and place not in self._needed and (
            recipe is not None and recipe.needed_bytes <= self.limit_bytes)
        if way is State.DROPPED and not can_be_dropped:
            way = State.MOVED
        if way is State.MOVED and not self._host_has_room(place.size_bytes):
            if not can_be_dropped:
                return False
            way = State.DROPPED
        if memory is None:
            return False
        if way is State.MOVED:
            try:
                place.host = memory.copy_out(place.storage)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # The host is out of memory, too.
                if not can_be_dropped:
                    return False
                way = State.DROPPED
        if way is State.MOVED:
            accounts.host_bytes += place.size_bytes
            accounts.moved_out_bytes += place.size_bytes
        else:
            accounts.dropped_bytes += place.size_bytes
        if way is State.DROPPED and recipe is not None:
            recipe.hold()
            for read, _ in recipe.read:
                read.dependents.add(place)
        memory.offload(place.storage)
        place.state = way
        accounts.went(place.role, place.size_bytes)
        accounts.evicted[Gone.ACTIVE_KV_CACHE if candidate.is_active_cache else Gone(place.role.value)] += 1
        return True

    def _host_has_room(self, size_bytes: int) -> bool:
        if not self.host_limit_bytes:
            return True
        limit_bytes = self.host_limit_bytes + self._leaving_bytes

        def kept_bytes() -> int:
            return 0 if self._spare is None else self._spare.size_bytes

        is_short = self.accounts.host_bytes + kept_bytes() + size_bytes > limit_bytes
        if is_short and self._spare is not None and self._spare.drop_spare():
            self.accounts.evicted[Gone.UPLOADS] += 1
        return self.accounts.host_bytes + kept_bytes() + size_bytes <= limit_bytes

    def _fill(self, place: ManagedStorage) -> None:
        """Copy a storage back from the host; there is room for it."""
        memory, data = self._memory, place.host
        assert memory is not None
        assert data is not None
        self.with_relief(lambda: memory.restore(place.storage, data))
        if place.state is State.MOVED:
            self.accounts.host_bytes -= place.size_bytes
            place.host = None
        self.accounts.moved_in_bytes += place.size_bytes
        self._is_back(place)

    def _is_back(self, place: ManagedStorage) -> None:
        place.state = State.HERE
        self.accounts.came(place.role, place.size_bytes)
        self.accounts.restored += 1

    def _compute(self, tenant: MemoryClient, place: ManagedStorage) -> None:
        """Recompute a dropped storage, and all other dropped results of the same run."""
        recipe = place.recipe
        assert recipe is not None
        inputs = recipe.held
        assert inputs is not None
        read = frozenset(read for read, _ in recipe.read)
        absent = [each for each in read if each.state is not State.HERE]
        missing = [each for each in recipe.made.values() if each.state is State.DROPPED and each.recipe is recipe]
        # While the results are copied to their storages, they exist twice.
        wanted_bytes = recipe.wanted_bytes + sum(each.size_bytes for each in missing)
        self._make_room(sum(each.size_bytes for each in absent) + wanted_bytes, read)
        before, self._in_use = self._in_use, read
        for each in absent:
            self._fill(each)
        failures: list[BaseException] = []

        def report(_: int, error: BaseException) -> Poisoned:
            failures.append(error)
            return Poisoned(0)

        try:
            outputs = recipe.program.run(list(inputs), recipe.numbers, tenant.random, report)
        finally:
            self._in_use = before
        if failures:
            raise self.no_room(wanted_bytes, self.accounts.held_bytes) from failures[0]
        for position, each in recipe.made.items():
            if each in missing:
                self._refill(tenant, each, recipe, outputs[position])

    def _refill(self, tenant: MemoryClient, place: ManagedStorage, recipe: Recipe, output: torch.Tensor) -> None:
        assert self._memory is not None
        self._memory.restore(place.storage, whole_of(output.untyped_storage()))
        self._is_back(place)
        tenant.places.unhold(place, recipe)

