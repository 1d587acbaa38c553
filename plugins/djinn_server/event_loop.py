"""The gateway's event loop: where everything runs that waits and moves no tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVarTuple

from anyio.from_thread import BlockingPortal, start_blocking_portal

__all__ = ("EventLoop",)

_log = logging.getLogger("djinn.server")
ArgsT = TypeVarTuple("ArgsT")


class EventLoop:
    """An event loop in a thread of its own, with one group of tasks.

    Tasks call blocking functions in threads, by `anyio.to_thread`.

    Concurrency:
        `start` and `stop` are called by one thread; `spawn` by any, between the two.
    """

    def __init__(self) -> None:
        self._running: AbstractContextManager[BlockingPortal] | None = None
        self._portal: BlockingPortal | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the loop."""
        self._running = start_blocking_portal(name="djinn-control")
        self._portal = self._running.__enter__()

    def spawn(self, function: Callable[[*ArgsT], Awaitable[object]], *args: *ArgsT) -> None:
        """Start a task; after `stop`, do nothing. If it fails, the error is logged."""
        with self._lock:
            if self._portal is not None:
                self._portal.start_task_soon(_logged, function, args)

    def stop(self) -> None:
        """Cancel all tasks, and wait for them. May be called twice, and without `start`."""
        with self._lock:
            portal, self._portal = self._portal, None
        if portal is not None and self._running is not None:
            portal.call(portal.stop, True)
            self._running.__exit__(None, None, None)


async def _logged(function: Callable[[*ArgsT], Awaitable[object]], args: tuple[*ArgsT]) -> None:
    try:
        await function(*args)
    except Exception:  # noqa: BLE001  # logged in full; it must not end the other tasks
        _log.exception("a task of the gateway failed")
