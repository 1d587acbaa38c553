"""Draining: what a server does between the request to end and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from djinn.errors import ServerDrainingError

__all__ = ("Drainable", "drain", "server_drains")

DRAIN_S = 25.0
"""How long sessions may go on, if nobody says otherwise. With the 5 s that programs may still run after that, it is the
time that Kubernetes leaves a process between SIGTERM and SIGKILL."""
LOOK_S = 0.05
RETRY_S = 1.0


def server_drains() -> ServerDrainingError:
    """Say that no session begins any more, in the same words in the gateway and in workers."""
    return ServerDrainingError("The server is shutting down: it waits for its sessions to end, and takes no new ones.",
                               hint="Try again when it has been restarted, or use another server.",
                               retry_after_s=RETRY_S)


class Drainable(Protocol):
    """What has sessions."""

    is_draining: bool

    @property
    def connections(self) -> int:
        """How many connections there are, with sessions that wait for theirs to come back."""


def drain(server: Drainable, drained: Callable[[], None]) -> None:
    """Let no more sessions begin, and report when the last one has ended.

    Args:
        server: Has the sessions.
        drained: Called then, by a thread of its own.
    """
    def wait() -> None:
        while server.connections:
            time.sleep(LOOK_S)
        drained()

    if not server.is_draining:
        server.is_draining = True
        threading.Thread(target=wait, name="djinn-drain", daemon=True).start()
