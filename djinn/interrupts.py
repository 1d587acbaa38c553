"""Ctrl-C, where it does no harm: not in the middle of a batch, and at once where the session waits.

A handler of SIGINT may raise wherever Python runs, and so between a frame and the number that counts it. While a
`SessionLock` is held, the handler that there is (Python's own, a framework's or the user's) still runs at once, but
what it raises waits: until the blocking call that is under way has been woken, or until the lock is released. A handler
that raises nothing disturbs nothing.

In place of Python's own handler, an interceptor may bring an `InterruptHandler` that raises where PyTorch can stand it.
It takes effect as soon as a session hands something over.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps it in takes longer than it does
import signal
import threading
import time
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType, TracebackType
from typing import Any, TypeVar
from weakref import WeakMethod

__all__ = ("Deferral", "InterruptHandler", "SessionLock", "acquired", "deferral", "interrupt_handler", "sleep",
           "through", "use_interrupt_handler", "use_pythons_handler")

_T = TypeVar("_T")
_LOOK_S = 0.05
"""How often a wait for a lock that another thread holds looks for an interrupt."""


class InterruptHandler:
    """Raises `KeyboardInterrupt` as Python's own handler does.

    Concurrency:
        The main thread's.
    """

    def __init__(self) -> None:
        self.hurry: WeakMethod[Callable[[], object]] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal; no frame, if nothing is recorded now."""
        signal.default_int_handler(number, frame)

    def use(self, hurry: Callable[[], object]) -> None:
        """Know a method that has the next operation take a `SessionLock`."""
        self.hurry = WeakMethod(hurry)

    def take(self) -> bool:
        """Whether an interrupt is still to be raised, which is the caller's business from now on."""
        return False

    def raises(self) -> None:
        """Know that an exception is about to be raised, here or by another handler."""

    def set(self, handler: Any) -> None:
        """Have Python call a handler."""
        _signal.signal(signal.SIGINT, handler)


_handler = InterruptHandler()


def interrupt_handler() -> InterruptHandler:
    """Return what takes the place of Python's own handler."""
    return _handler


def use_interrupt_handler(handler: InterruptHandler) -> None:
    """Let another one take the place of Python's own, from the next session on."""
    global _handler
    _handler = handler


def use_pythons_handler() -> None:
    """Let Python's own handler do again what an `InterruptHandler` does in its place, if one does."""
    if get_ident() == main_thread().ident and _signal.getsignal(signal.SIGINT) is _handler:
        _handler.set(signal.default_int_handler)


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
            # Nothing is recorded here.
            self.previous(number, None if self.previous is _handler else frame)
        except BaseException as error:
            self.error = self.error or error.with_traceback(None)
            _handler.raises()
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
    handler = _signal.getsignal(signal.SIGINT)
    return handler if type(handler) is Deferral else None


def through(action: Callable[[], _T]) -> _T:
    """Do something that an interrupt may end anywhere, also while interrupts are deferred."""
    deferred = deferral()
    return action() if deferred is None else deferred.through(action)


def acquired(lock: threading.RLock, deferred: Deferral | None) -> BaseException | None:
    """Wait for a lock, and return the interrupt that came before it could be had, if one did."""
    while not lock.acquire(timeout=-1 if deferred is None else _LOOK_S):
        if deferred is not None and deferred.error is not None:
            return deferred.error
    return None


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
        interrupt = acquired(self._lock, deferred or deferral())
        if interrupt is not None:
            if deferred is not None:
                _end(deferred)
            raise interrupt
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


def _begin() -> Deferral | None:
    """Defer interrupts, unless somebody does or there is no handler that could raise."""
    handler = _signal.getsignal(signal.SIGINT)
    if not callable(handler) or type(handler) is Deferral:
        return None
    deferred = Deferral(_handler if handler is signal.default_int_handler else handler)
    _handler.set(deferred)
    if _handler.take():
        deferred.error = KeyboardInterrupt()
        _handler.raises()
    return deferred


def _end(deferred: Deferral) -> None:
    if _signal.getsignal(signal.SIGINT) is deferred:
        _handler.set(deferred.previous)


def sleep(seconds: float) -> None:
    """Sleep, until an interrupt."""
    through(lambda: time.sleep(seconds))
