"""Which server of a cluster has which named session, so that the next client of that name is led to it.

Servers report digests of their named sessions. Between the moment in which a client is led to a server and the report
that follows from it, the directory itself remembers the session. A session whose server has left is not begun elsewhere
at once: perhaps only the connection to the directory broke, and there would be two sessions of one name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from djinn_lib_cluster.messages import Resolve

from djinn.errors import RefusedError

__all__ = ("LED_S", "RETURNING_S", "SETTLED_S", "NamedPlaces")

LED_S = 15.0
"""How long a client that was led to a server may take until the server reports the session."""
RETURNING_S = 30.0
"""How long a server that has left may take to come back with its sessions."""
SETTLED_S = 4.0
"""After its start, how long a directory waits for the first reports of servers that know it already."""


class NamedPlaces:
    """The named sessions of a cluster. A digest stands for one; see `djinn_lib_server.tenants.session_digest`.

    Args:
        clock: Returns the time in seconds.

    Concurrency:
        One thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._settled_s = clock() + SETTLED_S
        self._held: dict[str, frozenset[str]] = {}
        """By address of a server: the sessions that it has reported."""
        self._led: dict[str, tuple[str, float]] = {}
        """By session: where a client was led that will open it, and when."""
        self._lost: dict[str, tuple[str, float]] = {}
        """By session: the server that had it and has left, and when."""

    def reported(self, address: str, digests: Sequence[str]) -> None:
        """Note which sessions a server has."""
        self._held[address] = frozenset(digests)
        # It is back. What it had and does not report has ended with it.
        self._lost = {digest: lost for digest, lost in self._lost.items() if lost[0] != address}

    def left(self, address: str) -> None:
        """Note that a server has left."""
        now = self._clock()
        lost = dict.fromkeys(self._held.pop(address, ()), (address, now))
        self._lost = {digest: at for digest, at in self._lost.items() if now - at[1] < RETURNING_S} | lost

    def led(self, digest: str, address: str) -> None:
        """Note that a client was led to a server where it will open a session."""
        now = self._clock()
        self._led.pop(digest, None)
        while self._led and now - next(iter(self._led.values()))[1] >= LED_S:
            del self._led[next(iter(self._led))]
        self._led[digest] = address, now

    def unsettled_s(self, digest: str) -> float:
        """Return how long to wait if the directory has just begun: some server may still have to report the session."""
        return max(0.0, self._settled_s - self._clock()) if self._holder(digest) is None else 0.0

    def place_of(self, digest: str, wanted: Resolve) -> str | None:
        """Return the address of the server that has a session, or was given to a client that will open it there.

        Raises:
            RefusedError: That server does not answer, or has left and may come back.
        """
        now, holder = self._clock(), self._holder(digest)
        if holder is not None and holder != wanted.failed:
            return holder
        if holder is not None:
            raise RefusedError(f"The server {holder}, which has the session {wanted.session!r}, does not answer.",
                               hint="Try again; `djinn cluster status` shows whether the server is there.")
        address, since_s = self._lost.get(digest, ("", -RETURNING_S))
        if now - since_s < RETURNING_S:
            raise RefusedError(
                f"The server {address}, which has the session {wanted.session!r}, has left the cluster.",
                hint="Try again soon. If the server was only out of reach, the session is there with its values; if it "
                     f"was started again, or is not back within {RETURNING_S:g} s, a new session of that name begins.")
        address, since_s = self._led.get(digest, ("", -LED_S))
        return address if now - since_s < LED_S and address != wanted.failed else None

    def _holder(self, digest: str) -> str | None:
        return next((address for address, digests in self._held.items() if digest in digests), None)
