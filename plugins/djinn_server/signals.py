"""Operator signals to a running server: reload, drain and stop."""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable
from typing import Protocol

import attrs

from djinn.errors import DjinnError

__all__ = ("Operated", "ServerLoop", "catch_signals")

TICK_S = 0.5
"""How often to check that the listener and the parent process are still there."""
DRAIN_TICK_S = 0.05
_log = logging.getLogger("djinn.server")


class Operated(Protocol):
    """A server; see `djinn_server.gateway.Gateway`."""

    @property
    def is_accepting(self) -> bool:
        """Whether new connections are accepted."""

    @property
    def is_drained(self) -> bool:
        """Whether the last session has ended since `drain`."""

    def drain(self) -> None:
        """Refuse new sessions."""


def catch_signals() -> queue.SimpleQueue[int]:
    """Put signals into a queue. A handler may call only `put`, since it may interrupt the queue's own `get`."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _: signals.put(caught))
    return signals


@attrs.define(eq=False)
class ServerLoop:
    """Runs a server until it has to stop.

    Attributes:
        server: The server.
        signals: The queue from `catch_signals`.
        reload: Applies a changed configuration; if it is invalid, raises a `DjinnError` and changes nothing.
        drain_s: Returns how long sessions may continue after SIGTERM, in seconds.
        parent: Process ID of the parent; the server stops when the parent ends. 0 for none.
    """

    server: Operated
    signals: queue.SimpleQueue[int]
    reload: Callable[[], None]
    drain_s: Callable[[], float]
    parent: int = 0
    _ends_at: float | None = attrs.field(default=None, init=False)

    def run(self) -> int:
        """Wait until the server has to stop, and return the exit status."""
        while self.server.is_accepting:
            if self._is_over():
                return 0
            try:
                number = self.signals.get(timeout=TICK_S if self._ends_at is None else DRAIN_TICK_S)
            except queue.Empty:
                if not self._has_lost_its_parent():
                    continue
                number = signal.SIGTERM
            if self._heed(number):
                return 0
        _log.error("stopping: the listener failed")  # no bug
        return 1

    def _has_lost_its_parent(self) -> bool:
        """Whether the process that started this one has ended; ``True`` once."""
        if not self.parent or os.getppid() == self.parent:
            return False
        _log.warning("the process %d, which started this server, has ended", self.parent)
        self.parent = 0
        return True

    def _heed(self, number: int) -> bool:
        """Handle a signal, and return whether the server must stop at once."""
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            self._reload()
            return False
        drain_s = self.drain_s()
        if number == signal.SIGINT or self._ends_at is not None or not drain_s:
            _log.info("stopping: %s", name)
            return True
        self._ends_at = time.monotonic() + drain_s
        _log.info("draining: %s; no session begins any more, and those that there are may go on for %g s", name,
                  drain_s)
        self.server.drain()
        return False

    def _reload(self) -> None:
        try:
            self.reload()
        except DjinnError as error:
            _log.error("not reloaded, the configuration stays as it was: %s", error)  # no bug
        else:
            _log.info("reloaded")

    def _is_over(self) -> bool:
        if self._ends_at is None:
            return False
        if self.server.is_drained:
            _log.info("drained: the last session has ended")
            return True
        if time.monotonic() >= self._ends_at:
            _log.warning("the time to drain is over: the sessions that are left end")
            return True
        return False
