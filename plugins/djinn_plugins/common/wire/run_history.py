"""The runs of a session in their order: which run made which value, and which program ran before.

A handle is known by its origin: a program, how many of that program's runs ago, and the position among the results.
Origins stay the same where a loop begins anew, although all its handles jump.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

__all__ = ("Origin", "RunHistory", "with_origin")

Origin = tuple[int, int, int]
"""A program, a position among its results, and a lag: 0 for its last run, 1 for the one before.

A negative position is a distance from the first result: an upload, or whatever else got its handle just before a run.
"""
NOWHERE: Origin = (0, 0, 0)
"""Stands for a value that no recent run has made; no program has the number 0."""
MAX_RECENT = 8
"""Programs by which the first rounds of a loop are told from those after them."""
MAX_LAGS = 3
"""Runs of each program that values are looked for in."""
MAX_ORIGINS = 2
"""Origins remembered for one position: a loop reads some values from what ran before it, and then from itself."""
MAX_UNINDEXED = 64
"""Runs whose results can still be found although nothing has been looked for since."""
MAX_NEAR = 64
"""How far a handle that no run has made may be from the first result of a run."""
MAX_INDEXED = 1 << 14
"""Results that can be found, in all."""


def with_origin(origins: tuple[Origin, ...], origin: Origin | None) -> tuple[Origin, ...]:
    """Return the origins of a position after one more run. A second value in a row without one ends them."""
    if origin is None:
        return () if NOWHERE in origins else (NOWHERE, *origins)
    others = tuple([other for other in origins if other not in (origin, NOWHERE)])
    return (origin, *others)[:MAX_ORIGINS]


class RunHistory:
    """What ran, in order.

    Args:
        base: The history that this one continues, without a change to it. It must not change meanwhile.

    Attributes:
        program: Program of the last run; 0 for none.
        recent: Programs of the last runs, `MAX_RECENT` at most; the last one is at the end.
        top: The last result of the last run that had any.
        is_even: Whether the last run continued its program's earlier runs at their rates.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, base: RunHistory | None = None) -> None:
        self._base = base
        self.program: int = 0 if base is None else base.program
        self.recent: tuple[int, ...] = () if base is None else base.recent
        self.top: int = 0 if base is None else base.top
        self.is_even: bool = base is not None and base.is_even
        self._count: int = 0 if base is None else base._count
        self._runs: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}
        self._unindexed: deque[tuple[int, int, tuple[int, ...]]] = deque(maxlen=MAX_UNINDEXED)
        self._index: dict[int, tuple[int, int, int]] = {}
        """Program, position and number of the run that made a value, by its handle."""
        self._firsts: list[int] = []
        """First results of recent runs, in their order; handles rise."""

    def add(self, program: int, outputs: tuple[int, ...], *, is_even: bool) -> None:
        """Add a run."""
        self._count += 1
        self.program, self.is_even = program, is_even
        self.recent = (*self.recent[1 - MAX_RECENT:], program)
        if outputs:
            self.top = outputs[-1]
            self._runs[program] = ((self._count, outputs), *self._runs_of(program)[:MAX_LAGS - 1])
            self._unindexed.append((self._count, program, outputs))

    def forget(self, program: int) -> None:
        """Drop the results of a program that will not run again."""
        self._runs.pop(program, None)

    def origin_of(self, handle: int) -> Origin | None:
        """Return the origin of a value; ``None`` if no recent run made it."""
        if self._unindexed:
            self._bring_up_to_date()
        found = self._index.get(handle) or self._near(handle)
        if found is None:
            return None
        program, position, number = found
        for lag, (made, _) in enumerate(self._runs_of(program)):
            if made == number:
                return program, position, lag
        return None

    def handle_at(self, origins: tuple[Origin, ...], default: int) -> int:
        """Return the handle at the origin that was made last; ``default`` if there is none."""
        newest = 0
        for program, position, lag in origins:
            runs = self._runs_of(program)
            if lag < len(runs) and runs[lag][0] > newest and position < len(runs[lag][1]):
                newest, outputs = runs[lag]
                default = outputs[position] if position >= 0 else outputs[0] + position
        return default

    def _near(self, handle: int) -> tuple[int, int, int] | None:
        """Find the first result of a run that got its handle soon after this one."""
        place = bisect_right(self._firsts, handle)
        if place == len(self._firsts) or self._firsts[place] - handle > MAX_NEAR:
            return None
        first = self._firsts[place]
        made = self._index.get(first)
        return None if made is None else (made[0], handle - first, made[2])

    def _runs_of(self, program: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        found = self._runs.get(program)
        if found is None:
            return () if self._base is None else self._base._runs_of(program)
        return found

    def _bring_up_to_date(self) -> None:
        if len(self._index) > MAX_INDEXED:
            self._index.clear()
        self._firsts = [*self._firsts, *(outputs[0] for _, _, outputs in self._unindexed)][-MAX_UNINDEXED:]
        for number, program, outputs in self._unindexed:
            for position, handle in enumerate(outputs):
                self._index[handle] = program, position, number
        self._unindexed.clear()
