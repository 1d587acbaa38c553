"""The last thing that a process does, after all exit handlers of the program.

Only then it is known what the whole program has done, and only there its exit status can still change. It imports
nothing of djinn's, so that it can be the first handler that is registered, and therefore the last one that is called.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TypeAlias

__all__ = ("Last", "at_the_end", "expect_to_leave")

Last: TypeAlias = Callable[[], int | None]
"""Does the last thing. Returns the exit status to use instead of the present one, minus the number of a signal for a
process that is ended by it; ``None`` leaves the status as it is."""

_last: Last | None = None
_process = 0


def expect_to_leave() -> None:
    """Register the exit handler, if it is not registered yet."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        atexit.register(_leave)


def at_the_end(last: Last) -> None:
    """Set what is done at the end of this process. Processes that it forks do nothing."""
    global _last
    expect_to_leave()
    _last = last


def _leave() -> None:
    if _last is None or _process != os.getpid():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()
    status = _last()
    if status is None:
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
