"""The machine that repeats itself: what it computes it computes again, with anything that writes in between."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from djinn.session import Session
from djinn_conformance.machine import Machine, Statistics
from djinn_conformance.twins import Line, compare_values

__all__ = ("ReusingMachine", "reused")

_PURE = ("view", "compute", "random", "read", "data_dependent", "late", "out")
_DISTURBING = ("write", "write", "metadata", "mixed", "gradient", "random_state", "out", "sliced", "drop")
_MOST_LINES = 8
_ROOM_BYTES = (2**26, 2**26, 2048, 256)
"""What is enough for everything that a program makes, and what is soon used up."""
_NAME = re.compile(r"\b[tc][0-9]+\b")


def reused(session: Session) -> int:
    """Count what a session has not computed, or not brought home, because it was known."""
    stats = session.stats()
    return stats["results_reused"] + stats["results_not_fetched"]


class ReusingMachine(Machine):
    """Draws programs that repeat themselves, for a session that keeps results."""

    def __init__(self, session: Session, statistics: Statistics) -> None:
        super().__init__(session, statistics)
        self.lines: list[Line] = []

    @initialize(room=st.sampled_from(_ROOM_BYTES))
    def keep(self, room: int) -> None:
        """Choose how much may be kept."""
        self.session.keep_results(room)
        self.statistics.counts[f"room for {room} bytes"] += 1

    def _remember(self, line: Line) -> None:
        super()._remember(line)
        if line.group in _PURE and line.outcome.error is None:
            self.lines = [*self.lines[1 - _MOST_LINES:], line]

    def _repeatable(self) -> list[Line]:
        there = self.eager.tensors.keys()
        return [line for line in self.lines if there >= set(_NAME.findall(line.text))]

    @precondition(lambda self: self._repeatable())
    @rule(data=st.data(), times=st.integers(1, 3), waits=st.booleans(), compares=st.booleans(), writes=st.booleans())
    def do_again(self, data: Any, times: int, waits: bool, compares: bool, writes: bool) -> None:
        """Do again what was done before, as often as it takes to be known; write something, and do it again."""
        line = data.draw(st.sampled_from(self._repeatable()))
        before = reused(self.session)
        for _ in range(times):
            self._once_more(line, waits=waits)
        if writes:
            self._draw(data, data.draw(st.sampled_from(_DISTURBING)))
            if line in self._repeatable():
                self._once_more(line, waits=waits)
        if compares:
            self._settle()
            compare_values(self.eager, self.remote, None, self._where)
        self.statistics.counts["reused"] += reused(self.session) > before

    def _once_more(self, line: Line, *, waits: bool) -> None:
        if set(_NAME.findall(line.text)) <= self.eager.tensors.keys():
            self._do(line.text, line.group)
            self._do("synchronize()" if waits else "flush()", "wait")

    def teardown(self) -> None:
        """Finish as every program does, and keep nothing."""
        try:
            super().teardown()
        finally:
            self.session.keep_results(0)
