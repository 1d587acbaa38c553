"""Lines of the log that a peer can cause: they are summed up, so that no peer can fill the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

__all__ = ("StrangerLog",)

MAX_LINES = 10
"""Of one kind in an interval."""
INTERVAL_S = 10.0


class StrangerLog:
    """Writes some lines of each kind in an interval and, at its end, how many more there were.

    Args:
        log: Where they are written.
        clock: Returns the current time, in seconds.

    Concurrency:
        Any thread.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}
        """When the interval of each kind began, and how many lines it has had."""

    def write(self, level: int, kind: str, text: str, *values: object) -> None:
        """Write a line, unless there were too many of its kind.

        Args:
            level: Its level.
            kind: What the lines have in common, in words; one of few.
            text: The line, in the form of `logging`.
            values: Its values.
        """
        with self._lock:
            now_s = self._clock()
            begun_s, count = self._kinds.get(kind, (now_s, 0))
            if now_s - begun_s >= INTERVAL_S and count <= MAX_LINES:
                begun_s, count = now_s, 0
            self._kinds[kind] = begun_s, count + 1
            if count == MAX_LINES:
                end = threading.Timer(max(0.0, begun_s + INTERVAL_S - now_s), self._sum_up, (level, kind))
                end.daemon = True
                end.start()
        if count < MAX_LINES:
            self._log.log(level, text, *values)

    def _sum_up(self, level: int, kind: str) -> None:
        with self._lock:
            _, count = self._kinds.pop(kind)
        self._log.log(level, "%s: %d more such lines in %g s", kind, count - MAX_LINES, INTERVAL_S)
