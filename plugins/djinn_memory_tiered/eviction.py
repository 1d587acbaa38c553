"""What goes first."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import attrs

from djinn_memory_tiered.places import Place, State
from djinn_memory_tiered.roles import Role

QUICK_S = 0.05
"""What took longer to compute is rather moved than computed again."""
PREFILL_SHARE = 0.2
"""Part of the limit up to which caches of keys and values go no sooner than anything else that is cold."""
DECODE_SHARE = 0.6
"""The same while a session decodes; see `djinn.planning`."""


class Rank(IntEnum):
    """The order in which storages go; those of one rank go the least recently used first."""

    RECOMPUTABLE = 0
    SURPLUS_CACHE = 1
    """Of caches of keys and values nobody decodes with, what is beyond their share."""
    RELOADABLE = 2
    COLD = 3
    ACTIVE_CACHE = 4
    """A cache of keys and values of a session that decodes."""


@attrs.frozen(eq=False)
class Candidate:
    """Something that may go.

    Attributes:
        place: The storage.
        session: Number of its session.
        is_active: Whether that session decodes.
    """

    place: Place
    session: int
    is_active: bool

    @property
    def is_active_cache(self) -> bool:
        """Whether it is a cache of keys and values of a session that decodes."""
        return self.is_active and self.place.role is Role.KV_CACHE


def in_order(candidates: Iterable[Candidate], limit_bytes: int) -> list[Candidate]:
    """Sort what may go, what goes first first.

    Args:
        candidates: What may go; all of it is on the device.
        limit_bytes: What the device may hold.
    """
    least_recent = sorted((candidate for candidate in candidates if candidate.place.size_bytes),
                          key=lambda candidate: candidate.place.used_at)
    caches = [candidate for candidate in least_recent if candidate.place.role is Role.KV_CACHE]
    decodes = any(candidate.is_active for candidate in least_recent)
    left = sum(candidate.place.size_bytes for candidate in caches) - (
        DECODE_SHARE if decodes else PREFILL_SHARE) * limit_bytes
    surplus: set[Place] = set()
    for candidate in caches:
        if left > 0 and not candidate.is_active:
            surplus.add(candidate.place)
            left -= candidate.place.size_bytes
    return sorted(least_recent, key=lambda candidate: _rank(candidate, candidate.place in surplus))


def is_quick(place: Place) -> bool:
    """Whether a storage had better be computed again than moved."""
    return place.can_be_dropped and place.recipe is not None and place.recipe.duration_s <= QUICK_S


def _rank(candidate: Candidate, is_surplus: bool) -> Rank:
    place = candidate.place
    if candidate.is_active_cache:
        return Rank.ACTIVE_CACHE
    if is_surplus:
        return Rank.SURPLUS_CACHE
    if place.role is not Role.KV_CACHE and is_quick(place):
        return Rank.RECOMPUTABLE
    if place.can_be_reloaded:
        return Rank.RELOADABLE
    return Rank.COLD


def way_out(place: Place) -> State:
    """Say where the bytes of a storage had better go."""
    if place.can_be_reloaded:
        return State.RELOADABLE
    return State.DROPPED if place.role is not Role.KV_CACHE and is_quick(place) else State.MOVED
