"""Limits a process that is not trusted to a part of a thread's time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ("Pacing",)

SHARE = 0.5
"""The part of a thread's time that the messages of one process may take in the long run."""
BURST_S = 0.25
"""Time that they may take at once, before the next one waits."""


class Pacing:
    """Counts the time that a thread has spent for one process, and says when to continue.

    Args:
        clock: Returns the current time, in seconds.

    Concurrency:
        One thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent_s = 0.0
        self._at_s = clock()

    def add(self, spent_s: float) -> None:
        """Count processor time that was spent; a busy machine adds nothing to it."""
        now_s = self._clock()
        self._spent_s = max(0.0, self._spent_s - (now_s - self._at_s) * SHARE) + min(spent_s, BURST_S)
        self._at_s = now_s

    def pause_s(self) -> float:
        """Return how long to wait before more is done for that process."""
        return max(0.0, self._spent_s - BURST_S) / SHARE
