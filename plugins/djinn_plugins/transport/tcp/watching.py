"""Watches idle connections, so that a session is resumed before its lease ends."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from djinn_plugins.transport.tcp.sockets import ByteStream

__all__ = ("Watched", "watch")

LOOK_S = 5.0
"""How often to check whether the connection still exists, and, where the system sends no event, whether it broke."""


class Watched(Protocol):
    """An object whose connection can be watched."""

    @property
    def watched_stream(self) -> ByteStream | None:
        """The stream that may break; ``None`` when there is nothing more to watch."""

    def go_on_if_gone(self) -> None:
        """Repair the connection if it broke. Never raises."""


def watch(watched: Watched) -> None:
    """Start a thread that reacts to a broken connection at once. It ends with the session or with the object."""
    threading.Thread(target=_watch, args=(weakref.ref(watched),), name="djinn-watch", daemon=True).start()


def _watch(reference: weakref.ref[Watched]) -> None:
    while True:
        watched = reference()
        stream = None if watched is None else watched.watched_stream
        if watched is None or stream is None:
            return
        watched.go_on_if_gone()
        # The watch must not keep the object alive.
        del watched
        stream.wait_until_gone(LOOK_S)
