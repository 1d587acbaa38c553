"""Ctrl-C, where it does no harm: not in the middle of a batch, and at once where the session waits.

A handler of SIGINT may raise wherever Python runs, and so between a frame and the number that counts it. While a
`SessionLock` is held, the handler that there is (Python's own, a framework's or the user's) still runs at once, but what
it raises waits: until the blocking call that is under way has been woken, or until the lock is released. A handler that
raises nothing disturbs nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from _signal import getsignal, signal as set_handler  # without the enumerations of `signal`, which take longer than it
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType, TracebackType
from typing import Any, TypeVar

__all__ = ("Deferral", "SessionLock", "deferral", "sleep", "through")

_T = TypeVar("_T")
_LOOK_S = 0.05
"""How often a wait for a lock that another thread holds looks for an interrupt."""


class Deferral:
    """Takes the place of a handler of SIGINT, and keeps what it raises.

    Args:
        previous: That handler.

    Attributes:
        error: What it has raised first.
    """

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous
        self.error: BaseException | None = None
        self._wake: Callable[[], object] | None = None
        self._lets_through = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        try:
            self.previous(number, frame)
        except BaseException as error:
            self.error = self.error or error.with_traceback(None)
            if self._lets_through:
                raise
            if self._wake is not None:
                self._wake()

    def wait(self, wake: Callable[[], object], action: Callable[[], _T]) -> _T:
        """Do something that blocks, unless there was an interrupt, and until there is one.

        Args:
            wake: Has it return, or raise an `OSError` or `EOFError`. Called by a signal handler, in the midst of it.
            action: Blocks.

        Raises:
            BaseException: What the handler has raised, if it was not done before.
        """
        self._wake = wake
        try:
            if self.error is None:
                return action()
        except (OSError, EOFError):
            if self.error is None:
                raise
        finally:
            self._wake = None
        raise self.error

    def through(self, action: Callable[[], _T]) -> _T:
        """Do something that an exception may end anywhere."""
        if self.error is not None:
            raise self.error
        self._lets_through = True
        try:
            return action()
        finally:
            self._lets_through = False


def deferral() -> Deferral | None:
    """Return what defers interrupts of this thread; ``None`` if nothing does, or none comes here."""
    if get_ident() != main_thread().ident:
        return None
    handler = getsignal(signal.SIGINT)
    return handler if type(handler) is Deferral else None


def through(action: Callable[[], _T]) -> _T:
    """Do something that an interrupt may end anywhere, also while interrupts are deferred."""
    deferred = deferral()
    return action() if deferred is None else deferred.through(action)


class SessionLock:
    """A reentrant lock whose holder is not interrupted in the midst of what it does.

    Args:
        interrupted: Called before the lock is released if there was an interrupt.

    Concurrency:
        Only the main thread is ever interrupted; others lock and unlock.
    """

    def __init__(self, interrupted: Callable[[], object]) -> None:
        self._lock = threading.RLock()
        self._interrupted = interrupted
        self._held: list[Deferral | None] = []

    def __enter__(self) -> None:
        deferred = _begin() if get_ident() == main_thread().ident else None
        if deferred is None:
            self._acquire(deferral())
        else:
            try:
                self._acquire(deferred)
            except BaseException:
                _end(deferred)
                raise
        self._held.append(deferred)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        deferred = self._held.pop()
        try:
            if deferred is not None and deferred.error is not None:
                self._interrupted()
        finally:
            self._lock.release()
            if deferred is not None:
                # From here on the next interrupt raises at once.
                _end(deferred)
                if deferred.error is not None and deferred.error is not error:
                    raise deferred.error

    def _acquire(self, deferred: Deferral | None) -> None:
        if deferred is None:
            self._lock.acquire()
            return
        if self._lock.acquire(blocking=False):
            return
        while deferred.error is None:
            if self._lock.acquire(timeout=_LOOK_S):
                return
        raise deferred.error


def _begin() -> Deferral | None:
    """Defer interrupts, unless somebody does or there is no handler that could raise."""
    handler = getsignal(signal.SIGINT)
    if not callable(handler) or type(handler) is Deferral:
        return None
    deferred = Deferral(handler)
    set_handler(signal.SIGINT, deferred)
    return deferred


def _end(deferred: Deferral) -> None:
    if getsignal(signal.SIGINT) is deferred:
        set_handler(signal.SIGINT, deferred.previous)


def sleep(seconds: float) -> None:
    """Sleep, until an interrupt."""
    through(lambda: time.sleep(seconds))
