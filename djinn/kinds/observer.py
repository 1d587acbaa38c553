"""Observers receive a session's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Observer(Protocol):
    """Receives counters when a session ends or on request. Never called per operation."""

    name: str
    """Name in the configuration."""

    def observe(self, stats: Mapping[str, int]) -> None:
        """Receive a snapshot of the session's counters, as returned by `djinn.stats`.

        Laws:
            observer.does_not_raise, observer.stats_unchanged
        """
