"""Pauses between two steps of a program, and the time that a thread has worked without them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic_ns

__all__ = ("Pause", "paused_ns", "reason_to_stop", "worked_ns")


class Pause(BaseException):
    """Among the reasons to stop of a program: not a reason, but a request to wait before the next step.

    Args:
        wait: Called by the program's thread, between two steps; returns when the program may go on.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.wait = wait


class _Here(threading.local):
    paused_ns = 0


_here = _Here()


def reason_to_stop(stop: Sequence[BaseException]) -> BaseException | None:
    """Wait if a pause is requested; then return the reason to stop, if there is one."""
    for found in tuple(stop):
        if isinstance(found, Pause):
            began_ns = monotonic_ns()
            found.wait()
            _here.paused_ns += monotonic_ns() - began_ns
    return next((found for found in tuple(stop) if not isinstance(found, Pause)), None)


def paused_ns() -> int:
    """Return how long programs of this thread have paused up to now."""
    return _here.paused_ns


def worked_ns() -> int:
    """Return the time by the monotonic clock, less all pauses of this thread: only differences mean anything."""
    return monotonic_ns() - _here.paused_ns
