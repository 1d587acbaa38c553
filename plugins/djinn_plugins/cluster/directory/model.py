"""What the page of a cluster shows, and the command that it executes: draining a server."""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import anyio.from_thread

from djinn.errors import ConfigurationError, RefusedError
from djinn_plugins.cluster.directory.choosing import ServerListing
from djinn_plugins.cluster.messages import ListedServer

__all__ = ("ClusterModel",)

EVERY_S = 2.0
MAX_SAMPLES = 300
_COLUMNS = (("server", "text", False), ("state", "text", True), ("sessions", "count", False), ("held", "bytes", False),
            ("limit", "bytes", False), ("models", "text", False))


class ClusterModel:
    """The content of a cluster's page, for the holder of its key.

    See `djinn_plugins.common.dashboard.endpoint.DashboardModel`.

    Args:
        name: The cluster's name.
        address: The directory's address.
        key: The key that servers share with the directory.
        listing: The servers; belongs to the event loop.
        drain: Drains the server at an address, and returns the outcome.
        clock: Returns the time in seconds.

    Concurrency:
        `run` is a task of the event loop; the other methods are called in its threads.
    """

    def __init__(self, name: str, address: str, key: str, listing: ServerListing,
                 drain: Callable[[str], Coroutine[Any, Any, str]],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._about = f"cluster {name} · {address}"
        self._key = key.encode()
        self._listing = listing
        self._drain = drain
        self._clock = clock
        self._samples: deque[tuple[float, int, int, int]] = deque(maxlen=MAX_SAMPLES)

    async def run(self) -> None:
        """Take samples for the charts until cancelled."""
        while True:
            self.sample()
            await anyio.sleep(EVERY_S)

    def sample(self) -> None:
        """Remember the sums of this moment."""
        loads = [server.load for server in self._listing.all() if server.load is not None]
        self._samples.append((self._clock(), len(loads), sum(load.sessions for load in loads),
                              sum(load.held_bytes for load in loads)))

    def state(self, secret: str) -> dict[str, Any]:
        """Return the content of the page."""
        self._check(secret)
        servers, samples = anyio.from_thread.run_sync(lambda: (list(self._listing.all()), list(self._samples)))
        is_ready = any(server.load is not None and not server.load.problem for server in servers)
        return {"about": self._about, "problem": "" if is_ready else "No session can begin: no server is ready.",
                "is_operator": True, "can_drain": False, "charts": list(_charts(samples)), "tables": [_table(servers)]}

    def act(self, secret: str, action: str, target: str) -> dict[str, Any]:
        """Drain a server."""
        self._check(secret)
        if action != "drain":
            raise ConfigurationError(f"There is no command {action[:40]!r}.",
                                     hint="There is: drain. Sessions are ended at the pages of their servers.")
        return {"said": anyio.from_thread.run(self._drain, target)}

    def _check(self, secret: str) -> None:
        if not hmac.compare_digest(secret.encode("utf-8", "surrogateescape"), self._key):
            raise RefusedError("The key is wrong." if secret else "The key is missing.",
                               hint="Enter the content of the file that the directory was started with.")


def _charts(samples: list[tuple[float, int, int, int]]) -> Iterator[dict[str, Any]]:
    seconds = samples[-1][0] - samples[0][0] if samples else 0.0
    titles = (("Servers", "count"), ("Sessions", "count"), ("Held by sessions", "bytes"))
    for index, (title, how) in enumerate(titles, 1):
        yield {"title": title, "format": how, "seconds": seconds, "values": [sample[index] for sample in samples]}


def _table(servers: list[ListedServer]) -> dict[str, Any]:
    rows = [{"cells": [server.address, load.problem, load.sessions, load.held_bytes, load.limit_bytes or None,
                       ", ".join(load.models[::2])],
             "action": {"title": "Drain", "name": "drain", "target": server.address,
                        "question": f"Let {server.address} refuse new sessions, and end after the last one?"}}
            for server in servers if (load := server.load) is not None]
    return {"id": "servers", "title": "Servers", "rows": rows, "columns": [
        {"title": title, "format": how, "is_problem": is_problem} for title, how, is_problem in _COLUMNS]}
