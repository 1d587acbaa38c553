"""Looks after a connection while nobody uses it, so that a session is taken up again before its lease ends."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from djinn_transport_tcp.sockets import ByteStream

__all__ = ("Watched", "watch")

LOOK_S = 5.0
"""How often a watch looks whether there is still something to watch, and where the system does not wake it, at it."""


class Watched(Protocol):
    """What can be watched."""

    @property
    def watched_stream(self) -> ByteStream | None:
        """What may break; ``None`` when there is nothing more to watch."""

    def go_on_if_gone(self) -> None:
        """See to it, if it broke. Never raises."""


def watch(watched: Watched) -> None:
    """Have a thread see to it at once if it breaks, until it is over or nobody has it any more."""
    threading.Thread(target=_watch, args=(weakref.ref(watched),), name="djinn-watch", daemon=True).start()


def _watch(reference: weakref.ref[Watched]) -> None:
    while True:
        watched = reference()
        stream = None if watched is None else watched.watched_stream
        if watched is None or stream is None:
            return
        watched.go_on_if_gone()
        # It is not to live longer for being watched.
        del watched
        stream.wait_until_gone(LOOK_S)
