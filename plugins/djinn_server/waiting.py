"""Connections that have not said who they are."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from djinn.kinds.transport import Channel

__all__ = ("MAX_WAITING", "WaitingRoom")

MAX_WAITING = 128
_log = logging.getLogger("djinn.server")


class WaitingRoom:
    """Has room for so many connections. For one more, that which has waited longest is closed.

    Those who know what to say take milliseconds, so it is hardly ever one of them.

    Args:
        places: How many; each takes a thread, and at most 4 KiB of what it says.
        reject: Told of each that is closed for another one.

    Concurrency:
        Any thread.
    """

    def __init__(self, places: int = MAX_WAITING, reject: Callable[[], None] = lambda: None) -> None:
        self._places = places
        self._reject = reject
        self._lock = threading.Lock()
        self._waiting: weakref.WeakKeyDictionary[Channel, None] = weakref.WeakKeyDictionary()

    def enter(self, channel: Channel) -> None:
        """Let a connection wait here until it leaves, or is gone."""
        with self._lock:
            oldest = next(iter(self._waiting.keys()), None) if len(self._waiting) >= self._places else None
            if oldest is not None:
                del self._waiting[oldest]
            self._waiting[channel] = None
        if oldest is not None:
            _log.warning("%s: closed, because %d connections have not said who they are", oldest.peer, self._places)
            self._reject()
            oldest.close()

    def leave(self, channel: Channel) -> bool:
        """Let a connection go; whether it was here."""
        with self._lock:
            return self._waiting.pop(channel, self) is None

    def close(self) -> None:
        """Close all that wait."""
        with self._lock:
            waiting = list(self._waiting.keys())
        for channel in waiting:
            channel.close()
