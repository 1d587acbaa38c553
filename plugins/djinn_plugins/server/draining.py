"""Draining: waiting for sessions to end before the server stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from djinn.errors import ServerDrainingError

__all__ = ("Drainable", "drain", "server_drains")

LOOK_S = 0.05
RETRY_S = 1.0


def server_drains() -> ServerDrainingError:
    """Return the error for new sessions, the same in the gateway and in workers."""
    return ServerDrainingError("The server is shutting down: it waits for its sessions to end, and takes no new ones.",
                               hint="Try again when it has been restarted, or use another server.",
                               retry_after_s=RETRY_S)


class Drainable(Protocol):
    """An object with sessions that can be drained."""

    is_draining: bool

    @property
    def connections(self) -> int:
        """Number of connections, including sessions that wait to be resumed."""


def drain(server: Drainable, drained: Callable[[], None]) -> None:
    """Refuse new sessions, and report when the last one has ended.

    Args:
        server: Has the sessions.
        drained: Called when the last session has ended, in its own thread.
    """
    def wait() -> None:
        while server.connections:
            time.sleep(LOOK_S)
        drained()

    if not server.is_draining:
        server.is_draining = True
        threading.Thread(target=wait, name="djinn-drain", daemon=True).start()
