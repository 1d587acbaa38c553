"""Counts of calls that outlive the processes that make them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from support.operators.maker import CRASHED, HUNG, OUTCOMES, RAN
from support.operators.mutations import KINDS


class MetricsStore:
    """Counts that outlive the processes that make calls.

    For each overload: its next number, outcomes, and what was changed in calls that ran.
    """

    WIDTH = 1 + len(OUTCOMES) + len(KINDS)

    def __init__(self, overloads: int) -> None:
        self._map = mmap.mmap(-1, 8 * (2 + overloads * self.WIDTH))
        self._words = memoryview(self._map).cast("q")

    @property
    def current(self) -> int:
        """The overload that is being called."""
        return self._words[0]

    @current.setter
    def current(self, index: int) -> None:
        self._words[0] = index

    def next(self, overload: int) -> int:
        """Take the next number of an overload's calls."""
        at = 2 + overload * self.WIDTH
        self._words[at] += 1
        return self._words[at] - 1

    def tried(self, overload: int) -> int:
        """How many calls were tried."""
        return self._words[2 + overload * self.WIDTH]

    def note(self, overload: int, outcome: int, kinds: Sequence[str]) -> None:
        """Count a call."""
        at = 3 + overload * self.WIDTH
        self._words[at + outcome] += 1
        if outcome == RAN:
            for kind in kinds:
                self._words[at + len(OUTCOMES) + KINDS.index(kind)] += 1

    def ran(self, overload: int) -> int:
        """How many calls ran."""
        return self._words[3 + overload * self.WIDTH]

    def failed(self, overload: int) -> int:
        """How many calls ended their process."""
        at = 3 + overload * self.WIDTH
        return self._words[at + CRASHED] + self._words[at + HUNG]

    def counts(self, overload: int) -> dict[str, Any]:
        """What came of an overload's calls."""
        at = 3 + overload * self.WIDTH
        words = list(self._words[at:at + self.WIDTH - 1])
        return {"outcomes": dict(zip(OUTCOMES, words, strict=False)),
                "ran_with": {kind: count for kind, count in zip(KINDS, words[len(OUTCOMES):], strict=True) if count}}
