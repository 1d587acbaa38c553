"""Observers see what a session does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Observer(Protocol):
    """Receives counters when a session ends or asks. Never called per operation."""

    name: str
    """Name in the configuration."""

    def observe(self, stats: Mapping[str, int]) -> None:
        """Take a snapshot of the session's counters, as `djinn.stats` gives them.

        Laws:
            observer.does_not_raise, observer.stats_unchanged
        """
