"""How long the programs of a tenant's sessions ran, by name: those that took the most time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.server.kinds.metrics import MAX_PROGRAM_NAME, MAX_PROGRAMS, ProgramTime

__all__ = ("ProgramTimes", "summed")

MAX_KNOWN = 256
"""How many programs a worker counts. When there are more, the half that took the least time is forgotten."""


class ProgramTimes:
    """The running times of a worker's programs.

    Concurrency:
        The caller holds a lock whenever it calls a method.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ExecutionPhase], tuple[int, float, float]] = {}
        """Runs, their total time and the longest one in seconds, by name and phase."""

    def add(self, program: tuple[str, ExecutionPhase], seconds: float) -> None:
        """Count a run of a program, given its name and its phase."""
        known = self._known.get(program)
        if known is not None:
            runs, total_s, longest_s = known
            self._known[program] = runs + 1, total_s + seconds, max(longest_s, seconds)
            return
        if len(self._known) >= MAX_KNOWN:
            self._known = dict(heapq.nlargest(MAX_KNOWN // 2, self._known.items(), key=lambda item: item[1][1]))
        self._known[program] = 1, seconds, seconds

    def slowest(self) -> tuple[ProgramTime, ...]:
        """Return the programs that took the most time."""
        found = heapq.nlargest(MAX_PROGRAMS, self._known.items(), key=lambda item: item[1][1])
        return tuple(ProgramTime(name[:MAX_PROGRAM_NAME], phase, runs, int(total_s * 1e9), int(longest_s * 1e9))
                     for (name, phase), (runs, total_s, longest_s) in found)


def summed(tables: Iterable[Iterable[ProgramTime]]) -> tuple[ProgramTime, ...]:
    """Return the programs that took the most time in several tables together, that with the longest time first."""
    known: dict[tuple[str, ExecutionPhase], ProgramTime] = {}
    for table in tables:
        for more in table:
            one = known.get((more.name, more.phase))
            known[more.name, more.phase] = more if one is None else ProgramTime(
                one.name, one.phase, one.runs + more.runs, one.total_ns + more.total_ns,
                max(one.longest_ns, more.longest_ns))
    return tuple(heapq.nlargest(MAX_PROGRAMS, known.values(), key=lambda program: program.total_ns))
