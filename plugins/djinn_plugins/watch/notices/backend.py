"""A backend that counts the waits of a program by line, and warns of those that the program could avoid."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from types import FrameType
from typing import Any, TypeVar

import torch

from djinn.ir.tape import Tape
from djinn.ir.value import Slot
from djinn.kinds import Backend, Connection, OpenBackend
from djinn.kinds.backend_wrapper import BackendWrapper
from djinn_plugins.common.tracing.callers import is_torch
from djinn_plugins.common.tracing.waits import DjinnWarning, Line, LineWaits, Traffic, WaitLedger, is_installed
from djinn_plugins.graph.blocks import BLOCKS

__all__ = ("WatchedBackend", "open_watched")

MANY_WAITS = 50
"""Waits at one line that make a loop."""
LONG_S = 0.5
"""Waiting time at one line that is worth a warning."""
SHARE = 0.2
"""Share of the time since the first wait at a line that is worth one."""
_T = TypeVar("_T")
_APPLY = torch.nn.Module._apply.__code__


class WatchedBackend(BackendWrapper):
    """Counts waits by line.

    Args:
        plain: The backend that does the work.
        ledger: The session's account of waits.

    Concurrency:
        The caller holds the session's lock.
    """

    def __init__(self, plain: Backend, ledger: WaitLedger) -> None:
        super().__init__(plain)
        self._ledger = ledger
        self._movers: set[Line] = set()

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values."""
        found = self._counted(lambda: self.plain.fetch(slots, whole=whole))
        if BLOCKS.get() and found and isinstance(found[0], (bool, int, float, complex)):
            self._warn_of_constant()
        return found

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values."""
        return self._counted(lambda: self.plain.describe(slots))

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._counted(self.plain.synchronize)

    def _traffic(self) -> Traffic:
        round_trips = bytes_sent = bytes_received = 0
        for executor in self.plain.executors:
            connection = executor.connection
            round_trips += executor.round_trips + getattr(connection, "round_trips", 0)
            bytes_sent += connection.bytes_sent
            bytes_received += connection.bytes_received
        return round_trips, bytes_sent, bytes_received

    def _counted(self, action: Callable[[], _T]) -> _T:
        began_s, before = perf_counter(), self._ledger.traffic or self._traffic()
        try:
            result = action()
        except BaseException:
            self._count(began_s, perf_counter(), before)
            raise
        ended_s = perf_counter()
        if (waited := self._count(began_s, ended_s, before)) is not None:
            self._warn(*waited, ended_s)
        return result

    def _count(
        self, began_s: float, ended_s: float, before: Traffic
    ) -> tuple[Line, LineWaits, Line | None] | None:
        """Count a wait, if it was one; return its line, that line's account, and any line that moves a module."""
        ledger = self._ledger
        now = ledger.traffic = self._traffic()
        if now[0] < before[0]:
            # A recovery has opened other connections.
            before = 0, 0, 0
        if now[0] == before[0]:
            return None
        line, mover = _where(ledger)
        waits = ledger.at(line)
        waits.began_s = waits.began_s or began_s
        waits.round_trips += now[0] - before[0]
        waits.wait_s += ended_s - began_s
        waits.bytes_sent += now[1] - before[1]
        waits.bytes_received += now[2] - before[2]
        return line, waits, None if ledger.is_own_question else mover

    def _warn(self, line: Line, waits: LineWaits, mover: Line | None, now_s: float) -> None:
        if mover is not None and mover not in self._movers:
            self._movers.add(mover)
            _say(line, f"A module moved from the remote accelerator to the CPU, because {mover[0]}:{mover[1]} said so: "
                       "from here on it runs in this process. If the library is to use the accelerator, start the "
                       "program with `djinn run`, or set ACCELERATE_TORCH_DEVICE=remote_accelerator:0 for accelerate "
                       "and Trainer.")
        if waits.is_reported or waits.round_trips < MANY_WAITS or waits.wait_s < LONG_S:
            return
        passed_s = now_s - waits.began_s
        if waits.wait_s >= SHARE * passed_s:
            waits.is_reported = True
            _say(line, f"This line has waited {waits.round_trips} times for the executor, {waits.wait_s:.1f} s of the "
                       f"last {passed_s:.1f} s. Keep values on the device in the loop, and fetch them after it: "
                       'djinn.materialize(...) fetches many at once. djinn.stats(by="line") lists all waits.')

    def _warn_of_constant(self) -> None:
        """Warn of a number that a captured model reads."""
        frame = next((frame for frame in self._ledger.program_frames() if not is_torch(frame)), None)
        if (line := _line_of(frame)) is None or self._ledger.is_own_question:
            return
        is_first = [block.reads_at(line) for block in BLOCKS.get()]
        if any(is_first):
            _say(line, "The model reads a number here within djinn.capture: it is a constant of the graph, and "
                       "djinn.execute with other inputs uses it as it is now.")


def open_watched(opens: OpenBackend, ledger: WaitLedger, connections: Sequence[Connection], tape: Tape,
                 released: deque[int]) -> Backend:
    """Open a backend, and wrap it."""
    return WatchedBackend(opens(connections, tape, released), ledger)


def _where(ledger: WaitLedger) -> tuple[Line, Line | None]:
    """Return the user's line, and the library's line that moves a module, if there is one."""
    first: FrameType | None = None
    mover: FrameType | None = None
    moves = False
    for frame in ledger.program_frames():
        code = frame.f_code
        if is_torch(frame):
            moves = moves or code is _APPLY
            continue
        if not is_installed(code.co_filename):
            return (code.co_filename, frame.f_lineno), _line_of(mover)
        first = first or frame
        if moves and mover is None:
            mover = frame
    return _line_of(first) or ("(no Python)", 0), None


def _line_of(frame: FrameType | None) -> Line | None:
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _say(line: Line, text: str) -> None:
    file, number = line
    warnings.warn_explicit(text, DjinnWarning, file, number)
