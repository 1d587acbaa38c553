"""Connections that have not identified themselves."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from djinn_plugins.common.net.stranger_log import StrangerLog

__all__ = ("MAX_WAITING", "PendingHandshakes")

MAX_WAITING = 128
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)


class Pending(Protocol):
    """A connection, or the task that performs its handshake."""

    peer: str

    def close(self) -> None:
        """End it."""


class PendingHandshakes:
    """Holds a limited number of connections. When it is full, a new connection closes the one that has waited longest.

    A well-behaved client identifies itself within milliseconds, so it is hardly ever the one that is closed.

    Args:
        places: Maximum number; each connection uses at most 4 KiB of received data, and in a worker a thread.
        reject: Called for each connection that is closed to make room.

    Concurrency:
        Any thread.
    """

    def __init__(self, places: int = MAX_WAITING, reject: Callable[[], None] = lambda: None) -> None:
        self._places = places
        self._reject = reject
        self._lock = threading.Lock()
        self._waiting: weakref.WeakKeyDictionary[Pending, None] = weakref.WeakKeyDictionary()

    def enter(self, channel: Pending) -> None:
        """Add a connection, which stays until it leaves or is gone."""
        with self._lock:
            oldest = next(iter(self._waiting.keys()), None) if len(self._waiting) >= self._places else None
            if oldest is not None:
                del self._waiting[oldest]
            self._waiting[channel] = None
        if oldest is not None:
            _strangers.write(logging.WARNING, "closed to make room", "%s: closed, because %d connections have not said "
                             "who they are", oldest.peer, self._places)
            self._reject()
            oldest.close()

    def leave(self, channel: Pending) -> bool:
        """Remove a connection, and return whether it was here."""
        with self._lock:
            return self._waiting.pop(channel, self) is None

    def close(self) -> None:
        """Close all waiting connections."""
        with self._lock:
            waiting = list(self._waiting.keys())
        for channel in waiting:
            channel.close()
