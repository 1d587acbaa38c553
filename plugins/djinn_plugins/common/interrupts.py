"""Exceptions of signal handlers where they do no harm: never within a batch, and at once where a session waits.

A signal handler may raise anywhere in Python code, for example between sending a frame and counting it: that of SIGINT
when Ctrl-C is pressed, that of SIGALRM when a time is over. While a `SessionLock` is held, the installed handlers
(Python's own, a framework's or the user's) still run at once, but an exception that one of them raises is deferred:
until the current blocking call has been woken, or until the lock is released. A handler that raises nothing changes
nothing. While the lock is held, an `Interruption` takes the place of the exception, since a handler may raise a
`TimeoutError`, which a transport would take for its own.

In another thread, what `deferrals` holds for it takes the place of the handler: it ends what the thread waits for.

An interceptor may replace Python's own handler by an `InterruptHandler`, which raises where PyTorch can tolerate it. It
takes effect when a session first submits something.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing `signal`, which wraps it, takes longer
import signal
import threading
from collections.abc import Callable, Mapping
from threading import get_ident, main_thread
from time import sleep as _sleep
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar
from weakref import WeakMethod

__all__ = ("Deferral", "InterruptHandler", "Interruption", "SessionLock", "acquired", "deferral", "deferrals",
           "interrupt_handler", "sleep", "through", "use_interrupt_handler", "use_pythons_handler")

_T = TypeVar("_T")
_LOOK_S = 0.05
"""How often a wait for a lock held by another thread checks for an interrupt."""
_FAULTS = {getattr(signal, name, None) for name in ("SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSTOP")}
_NUMBERS = [int(number) for number in sorted(signal.valid_signals() - _FAULTS, key=lambda n: n == signal.SIGINT)
            if number < getattr(signal, "SIGRTMIN", number + 1)]
"""Signals that a handler in Python may answer, without those for real time. The last one's is restored last."""


class InterruptHandler:
    """Raises `KeyboardInterrupt` as Python's own handler does.

    Concurrency:
        The main thread.
    """

    def __init__(self) -> None:
        self.hurry: WeakMethod[Callable[[], object]] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal; the frame is ``None`` if no operation is being recorded."""
        signal.default_int_handler(number, frame)

    def use(self, hurry: Callable[[], object]) -> None:
        """Register a function that makes the next operation take a `SessionLock`."""
        self.hurry = WeakMethod(hurry)

    def take(self) -> bool:
        """Return whether an interrupt must still be raised; the caller is then responsible for raising it."""
        return False

    def raises(self) -> None:
        """Record that an exception is about to be raised, here or by another handler."""

    def set(self, handler: Any) -> None:
        """Install a handler with Python."""
        _signal.signal(signal.SIGINT, handler)


_handler = InterruptHandler()


def interrupt_handler() -> InterruptHandler:
    """Return the handler that replaces Python's own."""
    return _handler


def use_interrupt_handler(handler: InterruptHandler) -> None:
    """Replace Python's own handler by this one from the next session on."""
    global _handler
    _handler = handler


def use_pythons_handler() -> None:
    """Restore Python's own handler if an `InterruptHandler` has replaced it."""
    if get_ident() == main_thread().ident and _signal.getsignal(signal.SIGINT) is _handler:
        _handler.set(signal.default_int_handler)


class Interruption(BaseException):  # as `KeyboardInterrupt`, it is no error of whatever it ends
    """Stands for the exception of a signal handler while a `SessionLock` is held.

    Attributes:
        reason: The exception.
    """

    def __init__(self, reason: BaseException) -> None:
        super().__init__(reason)
        self.reason = reason


class Deferral:
    """Replaces signal handlers, and defers the exceptions that they raise.

    Args:
        previous: The replaced handlers, by signal.

    Attributes:
        error: Stands for the first exception that one of them raised.
        is_deferring: Whether a `SessionLock` is held; of a thread other than the main one.
    """

    def __init__(self, previous: Mapping[int, Callable[[int, FrameType | None], Any]]) -> None:
        self.previous = previous
        self.error: BaseException | None = None
        self.is_deferring = False
        self._wake: Callable[[], object] | None = None
        self._lets_through = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        previous = self.previous[number]
        try:
            # This frame is not recorded.
            previous(number, None if previous is _handler else frame)
        except BaseException as error:  # noqa: BLE001  # raised later, in the place of what it interrupted
            interruption = self.defer(error)
            if self._lets_through:
                raise interruption from None
            if self._wake is not None:
                self._wake()

    def defer(self, error: BaseException) -> BaseException:
        """Keep an exception of a handler, unless there is one already; return what stands for the first one."""
        self.error = made = self.error or Interruption(error.with_traceback(None))
        _handler.raises()
        return made

    def wait(self, wake: Callable[[], object], action: Callable[[], _T]) -> _T:
        """Run a blocking action, unless an interrupt is pending; an interrupt ends it.

        Args:
            wake: Makes the action return, or raise an `OSError` or `EOFError`. Called by a signal handler during the
                action.
            action: The blocking action.

        Raises:
            BaseException: The handler's exception, if the action had not finished before.
        """
        self._wake_with(wake)
        try:
            if self.error is None:
                return action()
        except (OSError, EOFError):
            if self.error is None:
                raise
        finally:
            self._wake_with(None)
        raise self.error

    def _wake_with(self, wake: Callable[[], object] | None) -> None:
        self._wake = wake

    def through(self, action: Callable[[], _T]) -> _T:
        """Run an action that an exception may end at any point."""
        if self.error is not None:
            raise self.error
        self._lets_through = True
        try:
            return action()
        finally:
            self._lets_through = False


deferrals: dict[int, Deferral] = {}
"""What defers cancellations, by the thread; of threads other than the main one that another thread may cancel."""
_current: Deferral | None = None
"""Defers interrupts of the main thread."""
_seen: list[Any] = [[], {}]
"""The handlers of all signals when they were last looked at, and those that are replaced, by signal."""


def deferral() -> Deferral | None:
    """Return the object that defers this thread's interrupts; ``None`` if there is none or none arrive here."""
    return _current if get_ident() == main_thread().ident else deferrals.get(get_ident())


def through(action: Callable[[], _T]) -> _T:
    """Run an action that an interrupt may end at any point, even while interrupts are deferred."""
    deferred = deferral()
    return action() if deferred is None else deferred.through(action)


def acquired(lock: threading.RLock, deferred: Deferral | None) -> BaseException | None:
    """Acquire a lock, and return the interrupt that arrived during the wait, if there was one."""
    while not lock.acquire(timeout=-1 if deferred is None else _LOOK_S):
        if deferred is not None and deferred.error is not None:
            return deferred.error
    return None


class SessionLock:
    """A reentrant lock that defers interrupts while it is held.

    Args:
        interrupted: Called before the lock is released if there was an interrupt.

    Concurrency:
        Only the main thread and those in `deferrals` are ever interrupted; others lock and unlock.
    """

    def __init__(self, interrupted: Callable[[], object]) -> None:
        self._lock = threading.RLock()
        self._interrupted = interrupted
        self._held: list[Deferral | None] = []
        self._owner = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread holds it, as far as can be seen without waiting."""
        return bool(self._held) and self._owner != get_ident()

    def __enter__(self) -> None:
        deferred = _begin()
        interrupt = acquired(self._lock, deferred or deferral())
        if interrupt is None and deferred is not None and deferred.is_deferring and deferred.error is not None:
            # Cancelled while it waited: nothing of its own may begin, which others would lose with it.
            self._lock.release()
            interrupt = deferred.error
        if interrupt is not None:
            if deferred is not None:
                _end(deferred)
            _raise(interrupt)
        self._owner = get_ident()
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
                # After this line, the next interrupt raises at once.
                _end(deferred)
                if deferred.error is not None and deferred.error is not error:
                    _raise(deferred.error)
                elif isinstance(error, Interruption):
                    _raise(error)


def _begin() -> Deferral | None:
    """Defer interrupts, unless they are deferred already or no installed handler could raise."""
    global _current
    if get_ident() != main_thread().ident:
        found = deferrals.get(get_ident())
        if found is None or found.is_deferring:
            return None
        found.is_deferring = True
        return found
    if _current is not None:
        return None
    handlers = list(map(_signal.getsignal, _NUMBERS))
    if handlers != _seen[0]:
        _seen[:] = handlers, {number: handler for number, handler in zip(_NUMBERS, handlers, strict=True)
                              if callable(handler) and type(handler) is not Deferral}
    installed = _seen[1]
    if not installed:
        return None
    if installed.get(signal.SIGINT) is signal.default_int_handler:
        installed[signal.SIGINT] = _handler
    deferred = Deferral(installed)
    try:
        for number in installed:
            _set(number, deferred)
    except BaseException:
        # Of a handler that was not replaced yet.
        _end(deferred)
        raise
    _current = deferred
    if _handler.take():
        deferred.defer(KeyboardInterrupt())
    return deferred


def _end(deferred: Deferral) -> None:
    global _current
    deferred.is_deferring = False
    if _current is deferred:
        _current = None
    is_over = False
    while not is_over:
        try:
            for number, handler in deferred.previous.items():
                if _signal.getsignal(number) is deferred:
                    _set(number, handler)
            is_over = True
        except BaseException as error:  # noqa: BLE001  # of a handler that is back already; raised when all are
            deferred.defer(error)


def _set(number: int, handler: Any) -> None:
    if number == signal.SIGINT:
        _handler.set(handler)
    else:
        _signal.signal(number, handler)


def _raise(error: BaseException) -> NoReturn:
    """Raise the exception that an interruption stands for, as its handler raised it."""
    if not isinstance(error, Interruption):
        raise error
    reason = error.reason
    context = reason.__context__
    try:
        raise reason
    finally:
        # Python adds the interruption.
        reason.__context__ = context


def sleep(seconds: float) -> None:
    """Sleep until the time is over or an interrupt arrives."""
    through(lambda: _sleep(seconds))
