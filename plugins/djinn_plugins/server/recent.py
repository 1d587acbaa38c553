"""A sum over the last seconds."""

from __future__ import annotations

import math

__all__ = ("RECENT_S", "RecentSum")

RECENT_S = 5.0
"""Time constant of recent sums: what is older counts less and less."""


class RecentSum:
    """A sum whose older parts decay exponentially. A constant rate adds up to that of `RECENT_S`.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._sum = self._since_s = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add an amount."""
        self._sum, self._since_s = self.at(now) + amount, now

    def at(self, now: float) -> float:
        """Return the sum at a time. Clocks of several threads may be a moment apart: it does not rise into the past."""
        return self._sum * math.exp(min(0.0, self._since_s - now) / RECENT_S)
