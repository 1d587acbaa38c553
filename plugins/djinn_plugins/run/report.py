"""What a run reports when it ends: where operations ran, and what the user should know."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import monotonic

__all__ = ("RunReport",)

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_COUNTED = ("operations", "round_trips", "bytes_sent", "bytes_received")


class RunReport:
    """Collects what a run reports.

    Attributes:
        problems: What is an error under ``--strict``.
        notes: What else the user should know.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._begin_s = monotonic()
        self._places: dict[str, None] = {}
        self._counts = dict.fromkeys(_COUNTED, 0)

    def note(self, text: str) -> None:
        """Tell the user something at the end; a text that was noted before is not repeated."""
        self._add(self.notes, text)

    def problem(self, text: str) -> None:
        """As `note`, for what the user should correct: under ``--strict``, the run fails."""
        self._add(self.problems, text)

    def begins(self, place: str) -> None:
        """Note that a session has begun.

        Args:
            place: Where its operations run, in words.
        """
        with self._lock:
            self._places[place] = None

    def ended(self, stats: Mapping[str, int]) -> None:
        """Add the counters of a session that has ended."""
        with self._lock:
            for name in _COUNTED:
                self._counts[name] += stats.get(name, 0)

    @property
    def has_run(self) -> bool:
        """Whether any operation has run on the device."""
        return self._counts["operations"] > 0

    def summary(self, running: Mapping[str, int] | None = None) -> str:
        """Say in one line what ran where.

        Args:
            running: Counters of the session that is still running.
        """
        passed_s = monotonic() - self._begin_s
        where = " and ".join(self._places) or "the device"
        counts = {name: count + (running or {}).get(name, 0) for name, count in self._counts.items()}
        if not counts["operations"]:
            return f"nothing ran on {where}; {passed_s:.1f} s"
        return (f"{_number(counts['operations'], 'operation')} on {where}, "
                f"{_number(counts['round_trips'], 'round trip')}, {_size(counts['bytes_sent'])} sent, "
                f"{_size(counts['bytes_received'])} received, {passed_s:.1f} s")

    def _add(self, texts: list[str], text: str) -> None:
        with self._lock:
            if text not in texts:
                texts.append(text)


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _size(amount: float) -> str:
    unit = 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.3g} {_UNITS[unit]}"
