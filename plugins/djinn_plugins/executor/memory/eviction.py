"""The eviction order."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import attrs

from djinn_plugins.executor.memory.roles import Role
from djinn_plugins.executor.memory.storages import ManagedStorage, State

QUICK_S = 0.05
"""Values that took longer to compute are moved to the host rather than recomputed."""
PREFILL_SHARE = 0.2
"""Fraction of the limit up to which KV caches are evicted no sooner than other cold storages."""
DECODE_SHARE = 0.6
"""The same fraction while a session decodes; see `djinn_plugins.schedule`."""


class Rank(IntEnum):
    """The eviction order of storages; within a rank, least recently used first."""

    RECOMPUTABLE = 0
    SURPLUS_CACHE = 1
    """KV caches of sessions that are not decoding, beyond the share of KV caches."""
    RELOADABLE = 2
    OPTIMIZER_STATE = 3
    """Only the next step of the optimizer needs it, after a forward and a backward pass."""
    COLD = 4
    GRADIENT = 5
    """The backward pass adds to it, and the next step of the optimizer reads it."""
    ACTIVE_CACHE = 6
    """A KV cache of a session that is decoding."""


@attrs.frozen(eq=False)
class EvictionCandidate:
    """A storage that may be evicted.

    Attributes:
        place: The storage.
        session: Number of its session.
        is_active: Whether that session is decoding.
    """

    place: ManagedStorage
    session: int
    is_active: bool

    @property
    def is_active_cache(self) -> bool:
        """Whether it is a KV cache of a session that is decoding."""
        return self.is_active and self.place.role is Role.KV_CACHE


def in_order(candidates: Iterable[EvictionCandidate], limit_bytes: int) -> list[EvictionCandidate]:
    """Sort candidates by eviction order, first to be evicted first.

    Args:
        candidates: The candidates; all of them are on the device.
        limit_bytes: What the device may hold.
    """
    least_recent = sorted((candidate for candidate in candidates if candidate.place.size_bytes),
                          key=lambda candidate: candidate.place.used_at)
    caches = [candidate for candidate in least_recent if candidate.place.role is Role.KV_CACHE]
    decodes = any(candidate.is_active for candidate in least_recent)
    left = sum(candidate.place.size_bytes for candidate in caches) - (
        DECODE_SHARE if decodes else PREFILL_SHARE) * limit_bytes
    surplus: set[ManagedStorage] = set()
    for candidate in caches:
        if left > 0 and not candidate.is_active:
            surplus.add(candidate.place)
            left -= candidate.place.size_bytes
    return sorted(least_recent, key=lambda candidate: _rank(candidate, candidate.place in surplus))


def is_quick(place: ManagedStorage) -> bool:
    """Whether a storage is cheaper to recompute than to move."""
    return place.can_be_dropped and place.recipe is not None and place.recipe.duration_s <= QUICK_S


def _rank(candidate: EvictionCandidate, is_surplus: bool) -> Rank:
    place = candidate.place
    if candidate.is_active_cache:
        return Rank.ACTIVE_CACHE
    if is_surplus:
        return Rank.SURPLUS_CACHE
    if place.role is not Role.KV_CACHE and is_quick(place):
        return Rank.RECOMPUTABLE
    if place.can_be_reloaded:
        return Rank.RELOADABLE
    return {Role.OPTIMIZER_STATE: Rank.OPTIMIZER_STATE, Role.GRADIENT: Rank.GRADIENT}.get(place.role, Rank.COLD)


def way_out(place: ManagedStorage) -> State:
    """Return the preferred way to evict a storage."""
    if place.can_be_reloaded:
        return State.RELOADABLE
    return State.DROPPED if place.role is not Role.KV_CACHE and is_quick(place) else State.MOVED
