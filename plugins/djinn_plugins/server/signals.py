"""Operator signals to a running server: reload, drain and stop."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Protocol

import anyio
import attrs
from anyio.abc import TaskGroup

from djinn.errors import DjinnError
from djinn_plugins.common.net.parents import await_parent_end

__all__ = ("SIGNALS", "Operated", "ServerLoop", "catch_signals")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log = logging.getLogger("djinn.server")


class Operated(Protocol):
    """A server; see `djinn_plugins.server.gateway.Gateway`."""

    async def wait_ready(self) -> None:
        """Wait until sessions can begin."""

    async def wait_failed(self) -> None:
        """Wait until no connections are accepted any more."""

    async def drain(self) -> None:
        """Refuse new sessions, and wait until the last one has ended."""


def catch_signals() -> list[signal.Signals]:
    """Collect signals in a list, until an event loop receives them."""
    caught: list[signal.Signals] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: caught.append(signal.Signals(number)))
    return caught


@attrs.define(eq=False)
class ServerLoop:
    """Runs a server until it has to stop.

    Attributes:
        server: The server.
        reload: Applies a changed configuration; if it is invalid, raises a `DjinnError` and changes nothing.
        drain_s: Returns how long sessions may continue after SIGTERM, in seconds.
        announce: Called when sessions can begin.
        parent: Process ID of the parent; the server stops when the parent ends. 0 for none.
    """

    server: Operated
    reload: Callable[[], Awaitable[None]]
    drain_s: Callable[[], float]
    announce: Callable[[], None]
    parent: int = 0
    _is_draining: bool = attrs.field(default=False, init=False)
    _status: int = attrs.field(default=0, init=False)

    async def run(self, signals: AsyncIterable[signal.Signals]) -> int:
        """Wait until the server has to stop, and return the exit status.

        Args:
            signals: The signals, as they arrive.

        Raises:
            DjinnError: The server cannot start.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._heed_all, signals, tasks)
            await self.server.wait_ready()
            self.announce()
            if self.parent:
                tasks.start_soon(self._watch_parent, tasks)
            await self.server.wait_failed()
            _log.error("stopping: the listener failed")  # no bug
            self._status = 1
            tasks.cancel_scope.cancel()
        return self._status

    async def _heed_all(self, signals: AsyncIterable[signal.Signals], tasks: TaskGroup) -> None:
        async for number in signals:
            await self._heed(number, tasks)

    async def _watch_parent(self, tasks: TaskGroup) -> None:
        """Treat the end of the process that started this one as SIGTERM."""
        await await_parent_end(self.parent)
        _log.warning("the process %d, which started this server, has ended", self.parent)
        await self._heed(signal.SIGTERM, tasks)

    async def _heed(self, number: signal.Signals, tasks: TaskGroup) -> None:
        if number == signal.SIGHUP:
            await self._reload()
            return
        drain_s = self.drain_s()
        if number == signal.SIGINT or self._is_draining or not drain_s:
            _log.info("stopping: %s", number.name)
            tasks.cancel_scope.cancel()
            return
        self._is_draining = True
        _log.info("draining: %s; no session begins any more, and those that there are may go on for %g s", number.name,
                  drain_s)
        tasks.start_soon(self._drain, drain_s, tasks)

    async def _drain(self, drain_s: float, tasks: TaskGroup) -> None:
        with anyio.move_on_after(drain_s):
            await self.server.drain()
            _log.info("drained: the last session has ended")
            tasks.cancel_scope.cancel()
            return
        _log.warning("the time to drain is over: the sessions that are left end")
        tasks.cancel_scope.cancel()

    async def _reload(self) -> None:
        try:
            await self.reload()
        except DjinnError as error:
            _log.error("not reloaded, the configuration stays as it was: %s", error)  # no bug
        else:
            _log.info("reloaded")
