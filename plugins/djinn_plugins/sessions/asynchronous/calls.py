"""Blocking calls in threads, so that the event loop stays free; cancelling the task cancels what the thread waits for.

A session sends its work in one sequence, which all tasks share. So work that was submitted is cancelled once no call
waits for it any more: if a task is cancelled while others wait, its call is abandoned and its result dropped; if none
waits, the session cancels the submitted work, as it does on Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from djinn_plugins.sessions.asynchronous.cancellation import Cancellation

__all__ = ("MAX_CALLS", "run")

T = TypeVar("T")
MAX_CALLS = 16
"""Maximum number of threads per event loop; further calls wait for one."""
_limiters: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("djinn_calls")
_lock = threading.Lock()
_awaited: set[_Call] = set()
"""Calls whose tasks wait."""
_abandoned: set[_Call] = set()
"""Calls that still run although their tasks were cancelled."""


class CallCancelled(BaseException):  # as `asyncio.CancelledError`, it is no error
    """Ends a call in its thread after its task was cancelled; nothing outside that thread sees it."""


class _Call(Cancellation):
    """One call.

    Attributes:
        is_running: Whether its thread has begun and not ended.
        is_left: Whether its task was cancelled.
    """

    def __init__(self) -> None:
        super().__init__(CallCancelled("the task was cancelled"))
        self.is_running = False
        self.is_left = False

    def begin(self) -> None:
        with _lock:
            if self.is_left:
                raise CallCancelled
            self.is_running = True

    def end(self) -> bool:
        """Record that the thread has ended, and return whether the task was cancelled before."""
        with _lock:
            self.is_running = False
            _abandoned.discard(self)
            return self.is_left

    def leave(self) -> bool:
        """Record that the task was cancelled, and return whether the thread still runs."""
        with _lock:
            self.is_left = True
            _awaited.discard(self)
            if self.is_running:
                _abandoned.add(self)
            unwanted = [] if _awaited else list(_abandoned)
        for call in unwanted:
            call.cancel()
        return self.is_running


async def run(function: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Call a function in a thread.

    Args:
        function: The function. Where it waits for a session, cancelling the task ends the wait.
        undo: Called with the result, in a thread, if the task was cancelled and does not get it.
    """
    call = _Call()
    made: list[T] = []

    def work() -> T:
        call.begin()
        is_left = False
        try:
            with call.thread():
                made.append(function())
        finally:
            is_left = call.end()
        if is_left:
            undo(made[0])
        return made[0]

    with _lock:
        _awaited.add(call)
    try:
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=_limiter())
    except anyio.get_cancelled_exc_class():
        if not call.leave() and made:
            # The thread had ended, but its result comes too late.
            threading.Thread(target=undo, args=(made[0],), name="djinn-undo", daemon=True).start()
        raise
    finally:
        with _lock:
            _awaited.discard(call)


def _limiter() -> anyio.CapacityLimiter:
    found = _limiters.get(None)
    if found is None:
        found = anyio.CapacityLimiter(MAX_CALLS)
        _limiters.set(found)
    return found
