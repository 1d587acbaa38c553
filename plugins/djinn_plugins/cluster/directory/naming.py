"""Which server of a cluster has which named session, so that the next client of that name is led to it.

Servers report digests of their named sessions. Between the moment in which a client is led to a server and the report
that follows from it, the directory itself remembers the session. A session whose server has left is not begun elsewhere
at once: perhaps only the connection to the directory broke, and there would be two sessions of one name.

If a server comes back later, there are two. Servers report when their sessions began, so that the later one has the
name, also for a directory that was started again. Clocks of servers must agree within `RETURNING_S` for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from djinn.errors import RefusedError
from djinn_plugins.cluster.messages import Resolve

__all__ = ("LED_S", "RETURNING_S", "SETTLED_S", "NamedPlaces")

LED_S = 15.0
"""How long a client that was led to a server may take until the server reports the session."""
RETURNING_S = 30.0
"""How long a server that has left may take to come back with its sessions."""
SETTLED_S = 4.0
"""After its start, how long a directory waits for the first reports of servers that know it already."""


class _Lost(NamedTuple):
    """A session whose server has left: when it began, the server, and when that left."""

    began: int
    address: str
    since_s: float


class NamedPlaces:
    """The named sessions of a cluster. A digest stands for one; see `djinn_plugins.server.tenants.session_digest`.

    Args:
        clock: Returns the time in seconds.

    Concurrency:
        One thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._settled_s = clock() + SETTLED_S
        self._held: dict[str, dict[str, int]] = {}
        """By address of a server: the sessions that it has reported, and when they began."""
        self._servers: dict[str, dict[str, int]] = {}
        """By session: the servers that have reported it, and when it began there."""
        self._led: dict[str, tuple[str, float]] = {}
        """By session: where a client was led that will open it, and when."""
        self._lost: dict[str, _Lost] = {}

    def reported(self, address: str, digests: Sequence[str], began: Sequence[int] = ()) -> None:
        """Note which sessions a server has, and when they began."""
        self._hold(address, dict(zip(digests, chain(began, repeat(0)), strict=False)))
        # It is back. What it had and does not report has ended with it.
        self._lost = {digest: lost for digest, lost in self._lost.items() if lost.address != address}

    def left(self, address: str) -> None:
        """Note that a server has left."""
        now = self._clock()
        lost = {digest: at for digest, at in self._lost.items() if now - at.since_s < RETURNING_S}
        for digest, began in self._held.get(address, {}).items():
            found = _Lost(began, address, now)
            lost[digest] = max(found, lost.get(digest, found))
        self._lost = lost
        self._hold(address, {})
        self._held.pop(address, None)

    def superseded(self, address: str) -> Iterator[tuple[str, str]]:
        """List the sessions of a server of which another one has a later one, with the address of the latter."""
        for digest in self._held.get(address, ()):
            if (holder := self._newest(digest)[1]) != address:
                yield digest, holder

    def led(self, digest: str, address: str) -> None:
        """Note that a client was led to a server where it will open a session."""
        now = self._clock()
        self._led.pop(digest, None)
        while self._led and now - next(iter(self._led.values()))[1] >= LED_S:
            del self._led[next(iter(self._led))]
        self._led[digest] = address, now

    def unsettled_s(self, digest: str) -> float:
        """Return how long to wait if the directory has just begun: some server may still have to report the session."""
        return max(0.0, self._settled_s - self._clock()) if not self._newest(digest)[1] else 0.0

    def place_of(self, digest: str, wanted: Resolve) -> str | None:
        """Return the address of the server that has a session, or was given to a client that will open it there.

        Raises:
            RefusedError: That server does not answer, or has left and may come back.
        """
        now, (began, holder) = self._clock(), self._newest(digest)
        led, since_s = self._led.get(digest, ("", -LED_S))
        if now - since_s < LED_S and led in self._held and led not in (holder, wanted.failed):
            return led
        lost = self._lost.get(digest)
        if lost is not None and now - lost.since_s < RETURNING_S and (lost.began, lost.address) > (began, holder):
            raise RefusedError(
                f"The server {lost.address}, which has the session {wanted.session!r}, has left the cluster.",
                hint="Try again soon. If the server was only out of reach, the session is there with its values; if it "
                     f"was started again, or is not back within {RETURNING_S:g} s, a new session of that name begins.")
        if holder and holder == wanted.failed:
            raise RefusedError(f"The server {holder}, which has the session {wanted.session!r}, does not answer.",
                               hint="Try again; `djinn cluster status` shows whether the server is there.")
        return holder or None

    def _newest(self, digest: str) -> tuple[int, str]:
        """Return when the latest session began, and its server's address, which is empty if no server has it."""
        return max(((began, address) for address, began in self._servers.get(digest, {}).items()), default=(0, ""))

    def _hold(self, address: str, digests: dict[str, int]) -> None:
        before = self._held.get(address, {})
        self._held[address] = digests
        if digests == before:
            return
        for digest in before.keys() - digests.keys():
            del self._servers[digest][address]
            if not self._servers[digest]:
                del self._servers[digest]
        for digest, began in digests.items():
            self._servers.setdefault(digest, {})[address] = began
