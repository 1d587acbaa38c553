"""Ctrl-C, where it does no harm: not in the middle of a batch, and at once where the session waits.

A handler of SIGINT may raise wherever Python runs, and so between a frame and the number that counts it. While a
`SessionLock` is held, the handler that there is (Python's own, a framework's or the user's) still runs at once, but
what it raises waits: until the blocking call that is under way has been woken, or until the lock is released. A handler
that raises nothing disturbs nothing.

Python's own handler also raises while PyTorch runs, which looks for signals where no exception may be raised: in what
it asks of a device written in Python, whenever it records a gradient. That aborts the process. So `raise_in_users_code`
takes its place as soon as a session hands something over. And where an exception is on its way out of a backward pass,
PyTorch looks for signals in functions that must not fail. So `interrupted_once` ignores the next interrupt there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps it in takes longer than it does
import _thread
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import get_ident, main_thread
from types import FrameType, TracebackType
from typing import Any, TypeVar
from weakref import WeakMethod

import torch

__all__ = ("Deferral", "SessionLock", "acquired", "deferral", "interrupted_once", "raise_in_users_code", "records_in",
           "sleep", "through", "use_pythons_handler")

_T = TypeVar("_T")
_HERE = Path(__file__).parent
_recording: tuple[str, ...] = (
    f"{Path(torch.__file__).parent}{os.sep}", f"{_HERE / 'model'}{os.sep}",
    *(str(_HERE / f"{name}.py") for name in (
        "binding", "interrupts", "link", "mixing", "recorder", "session", "tensor")))
"""Files in whose functions PyTorch may be at work below."""
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_CALLED = (_LIBRARY, "<attrs generated", "<frozen ")
"""Files whose functions work for those that call them: Python's own, and what is generated."""
_INSTALLED = f"{_LIBRARY}site-packages"
_SIG_IGN = ctypes.c_void_p(int(signal.SIG_IGN))
_set_handler = ctypes.pythonapi.PyOS_setsig
_set_handler.argtypes, _set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
AGAIN_S = 0.002
"""After so long an interrupt that could not be raised is tried again."""
_LOOK_S = 0.05
"""How often a wait for a lock that another thread holds looks for an interrupt."""


class _InterruptedOnce:
    """Within it, one interrupt raises, and the system ignores those that follow it until the end.

    Python's own table of handlers stays as it is: an interrupt that has just come still finds its handler.

    Concurrency:
        Other threads than the main one enter it without effect.

    Source:
        ``PyObject_Str`` of CPython looks for signals, and ``get_type_override`` of pybind11 calls it, in a destructor.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handler: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether that one has come."""
        return self._handler is not None

    def __enter__(self) -> None:
        if get_ident() == main_thread().ident:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == main_thread().ident:
            self._depth -= 1
            handler = self._handler
            if not self._depth and handler is not None:
                self._handler = None
                _set_handler(signal.SIGINT, handler)

    def raises(self) -> None:
        """Ignore what follows: an exception begins its way out. The main thread's."""
        if self._depth and self._handler is None:
            self._handler = _set_handler(signal.SIGINT, _SIG_IGN)

    def set_handler(self, handler: Any) -> None:
        """Set Python's handler, and go on to ignore interrupts if they are ignored."""
        _signal.signal(signal.SIGINT, handler)
        if self._handler is not None:
            _set_handler(signal.SIGINT, _SIG_IGN)


interrupted_once = _InterruptedOnce()


class _UsersCode:
    """Raises `KeyboardInterrupt` as Python's own handler does, but not while PyTorch or the recording is at work.

    Then it is raised by the next operation that is recorded, when the next `SessionLock` is taken, or in the user's
    code, whichever comes first.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._comes_again = False
        self._tries = 0
        self._hurry: WeakMethod[Callable[[], object]] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        comes_again, self._comes_again = self._comes_again, False
        if (comes_again and not self._is_pending) or interrupted_once.is_over:
            return
        if not _records(frame):
            self._is_pending = False
            interrupted_once.raises()
            raise KeyboardInterrupt
        self._is_pending = True
        hurry = None if self._hurry is None else self._hurry()
        if hurry is not None:
            hurry()
        # By another thread: here, it would come at once.
        self._tries += 1
        _thread.start_new_thread(self._again, (number, self._tries))

    def use(self, hurry: Callable[[], object]) -> None:
        """Have a method called that lets the next operation take a `SessionLock`."""
        self._hurry = WeakMethod(hurry)

    def take(self) -> bool:
        """Whether an interrupt is still to be raised, which is the caller's business from now on."""
        is_pending, self._is_pending = self._is_pending, False
        return is_pending

    def _again(self, number: int, tries: int) -> None:
        time.sleep(AGAIN_S)
        if self._is_pending and self._tries == tries:
            self._comes_again = True
            _thread.interrupt_main(signal.Signals(number))


raise_in_users_code = _UsersCode()


def _records(frame: FrameType | None) -> bool:
    """Whether PyTorch or the recording is at work, in this function or in what it works for."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_CALLED) or file.startswith(_INSTALLED):
            return file.startswith(_recording)
        frame = frame.f_back
    return False


def records_in(folder: Path) -> None:
    """Let no interrupt be raised by functions of a folder, because PyTorch may be at work below."""
    global _recording
    if f"{folder}{os.sep}" not in _recording:
        _recording = (*_recording, f"{folder}{os.sep}")


def use_pythons_handler() -> None:
    """Let Python's own handler do again what `raise_in_users_code` does in its place, if it does."""
    if get_ident() == main_thread().ident and _signal.getsignal(signal.SIGINT) is raise_in_users_code:
        interrupted_once.set_handler(signal.default_int_handler)


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
            self.previous(number, None if self.previous is raise_in_users_code else frame)
        except BaseException as error:
            self.error = self.error or error.with_traceback(None)
            interrupted_once.raises()
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
    deferred = Deferral(raise_in_users_code if handler is signal.default_int_handler else handler)
    interrupted_once.set_handler(deferred)
    if raise_in_users_code.take():
        deferred.error = KeyboardInterrupt()
        interrupted_once.raises()
    return deferred


def _end(deferred: Deferral) -> None:
    if _signal.getsignal(signal.SIGINT) is deferred:
        interrupted_once.set_handler(deferred.previous)


def sleep(seconds: float) -> None:
    """Sleep, until an interrupt."""
    through(lambda: time.sleep(seconds))
