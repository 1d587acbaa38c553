"""Round trips by line of the user's program, counted only where the program waits."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType

import attrs
import torch

from djinn_plugins.common.tracing.callers import is_own, program_frame

__all__ = ("DjinnWarning", "Line", "LineWaits", "Traffic", "WaitLedger", "WaitTable", "is_installed")

MAX_LINES = 10_000
"""Most lines that are counted; waits at further lines are counted together."""
ELSEWHERE = ("(elsewhere)", 0)
_ROOTS = (*{f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")},
          f"{Path(torch.__file__).parents[1]}{os.sep}", "<frozen")
"""Folders of installed packages and of Python itself."""

Line = tuple[str, int]
"""File and number of a line."""
Traffic = tuple[int, int, int]
"""Round trips, bytes sent, and bytes received, of all connections so far."""


class DjinnWarning(UserWarning):
    """Something that works, but probably not as the program's author expects. Filter it as any other warning."""


@attrs.define
class LineWaits:
    """Waits at one line.

    Attributes:
        round_trips: How often the program waited for an answer there.
        wait_s: How long in all.
        bytes_sent: Bytes sent since the wait before, until its end.
        bytes_received: Bytes received since the wait before, until its end.
        began_s: When the first wait began, on the clock of `time.perf_counter`.
        is_reported: Whether the user has been warned of it.
    """

    round_trips: int = 0
    wait_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    began_s: float = attrs.field(default=0.0, repr=False)
    is_reported: bool = attrs.field(default=False, repr=False)


class WaitTable(dict[str, LineWaits]):
    """Waits by line, ``file.py:12``; the longest first. It prints as a table."""

    def __str__(self) -> str:
        rows = [("round trips", "waited s", "sent B", "received B", "line")]
        rows += [(f"{waits.round_trips:,}", f"{waits.wait_s:.3f}", f"{waits.bytes_sent:,}",
                  f"{waits.bytes_received:,}", line) for line, waits in self.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows)


class WaitLedger:
    """Counts the waits of one session.

    Attributes:
        traffic: What had been transferred at the end of the last wait; ``None`` if nothing was counted yet.
        is_own_question: Whether djinn waits for an answer that the program has not asked for.

    Concurrency:
        The holder of the session's lock.
    """

    def __init__(self) -> None:
        self._lines: dict[Line, LineWaits] = {}
        self.traffic: Traffic | None = None
        self.is_own_question = False
        self._caller: FrameType | None = None

    @contextmanager
    def waiting(self, caller: FrameType | None) -> Iterator[None]:
        """Remember the caller for the length of a wait, so that the stack is walked only once.

        Args:
            caller: What `djinn_plugins.common.tracing.callers.program_frame` has found.
        """
        self._caller = caller
        try:
            yield
        finally:
            # A frame keeps its variables alive.
            self._caller = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask a server for djinn itself: the caller's stack does not say what such a wait is for."""
        self.is_own_question = True
        try:
            yield
        finally:
            self.is_own_question = False

    def program_frames(self) -> Iterator[FrameType]:
        """Give the callers outside djinn, from the innermost."""
        frame = self._caller or program_frame()
        while frame is not None:
            if not is_own(frame):
                yield frame
            frame = frame.f_back

    def at(self, line: Line) -> LineWaits:
        """Return the account of a line."""
        found = self._lines.get(line)
        if found is None:
            found = self._lines.setdefault(line if len(self._lines) < MAX_LINES else ELSEWHERE, LineWaits())
        return found

    def table(self) -> WaitTable:
        """List what was counted, the longest waits first."""
        lines = sorted(self._lines.items(), key=lambda item: -item[1].wait_s)
        return WaitTable({f"{file}:{number}" if number else file: attrs.evolve(waits)
                          for (file, number), waits in lines if waits.round_trips})

    def reset(self) -> None:
        """Count from zero; lines that were reported are not reported again."""
        self.traffic = None
        self._lines = {line: LineWaits(is_reported=True) for line, waits in self._lines.items() if waits.is_reported}


@lru_cache(4096)
def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package, or to Python itself."""
    return file.startswith(_ROOTS)
