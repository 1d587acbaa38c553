"""A machine that repeats computations, with and without writes in between, to test the result cache."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from djinn.session.session import Session
from djinn_conformance.differential import EagerLine, compare_values
from djinn_conformance.machine import Machine, Statistics
from djinn_conformance.refusals import overlaps_itself

__all__ = ("ReusingMachine", "keep_results", "reused")

_PURE = ("view", "compute", "random", "read", "data_dependent", "late", "out")
_DISTURBING = ("write", "write", "metadata", "mixed", "gradient", "random_state", "out", "sliced")
_MOST_LINES = 8
_ROOM_BYTES = (2**26, 2**26, 2048, 256)
"""Limits that are large enough for every program, and limits that are soon exhausted."""
_NAME = re.compile(r"\b[tc][0-9]+\b")


def reused(session: Session) -> int:
    """Count the results that a session did not compute, or not fetch, because they were cached."""
    stats = session.stats()
    return stats["results_reused"] + stats["results_not_fetched"]


def keep_results(session: Session, max_bytes: int) -> None:
    """Let a running session keep that many bytes of results from now on."""
    session.plugins.settings = session.plugins.settings.changed(result_cache_bytes=max_bytes)
    with session.lock:
        session.backend.use_cache(session.open_cache)


class ReusingMachine(Machine):
    """Draws programs that repeat themselves, for a session that keeps results."""

    def __init__(self, session: Session, statistics: Statistics) -> None:
        super().__init__(session, statistics)
        self.lines: list[EagerLine] = []

    @initialize(room=st.sampled_from(_ROOM_BYTES))
    def keep(self, room: int) -> None:
        """Choose the limit of the cache."""
        keep_results(self.session, room)
        self.statistics.counts[f"room for {room} bytes"] += 1

    def _remember(self, line: EagerLine) -> None:
        super()._remember(line)
        if line.group in _PURE and line.outcome.error is None:
            self.lines = [*self.lines[1 - _MOST_LINES:], line]

    def _repeatable(self) -> list[EagerLine]:
        there = self.eager.tensors.keys()
        return [line for line in self.lines if there >= set(_NAME.findall(line.text))]

    @precondition(lambda self: self._repeatable())
    @rule(data=st.data())
    def do_again(self, data: Any) -> None:
        """Repeat an earlier computation."""
        self._again(data, writes=False)

    @precondition(lambda self: self._repeatable())
    @rule(data=st.data())
    def do_again_after_a_write(self, data: Any) -> None:
        """Repeat an earlier computation, write something, and repeat it again."""
        self._again(data, writes=True)

    @precondition(lambda self: self._repeatable())
    @rule(data=st.data())
    def write_into_a_result(self, data: Any) -> None:
        """Repeat a computation until it is cached, write to its result, and repeat it again."""
        names = self._again(data, writes=False)
        there = [name for name in names if name in self.eager.tensors
                 and not (self.keeps_apart and overlaps_itself(self.eager.tensors[name]))]
        if there:
            name = data.draw(st.sampled_from(there))
            mode = "with torch.inference_mode(): " if self.eager.tensors[name].is_inference() else ""
            self._do(f"{mode}{name}.detach().zero_()", "write")
            self._again(data, writes=False)

    def _again(self, data: Any, *, writes: bool) -> tuple[str, ...]:
        """Repeat a computation until it is cached; return the names of the last results."""
        times, waits = data.draw(st.integers(2, 3)), data.draw(st.sampled_from((True, True, True, False)))
        compares = data.draw(st.booleans())
        line = data.draw(st.sampled_from(self._repeatable()))
        before = reused(self.session)
        names: tuple[str, ...] = ()
        for _ in range(times):
            names = self._once_more(line, waits=waits) or names
        if writes and any(self.groups.get(group) for group in _DISTURBING):
            self._draw(data, data.draw(st.sampled_from([group for group in _DISTURBING if self.groups.get(group)])))
            if line in self._repeatable():
                self._once_more(line, waits=waits)
        if compares:
            self._settle()
            compare_values(self.eager, self.remote, None, self._where)
        self.statistics.counts["reused"] += reused(self.session) > before
        return names

    def _once_more(self, line: EagerLine, *, waits: bool) -> tuple[str, ...]:
        if not set(_NAME.findall(line.text)) <= self.eager.tensors.keys():
            return ()
        names = self._do(line.text, line.group).names
        self._do("synchronize()" if waits else "flush()", "wait")
        return names

    def teardown(self) -> None:
        """Finish as every program does, and keep nothing."""
        try:
            super().teardown()
        finally:
            keep_results(self.session, 0)
