"""Which servers a directory names to a client."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator

import attrs

from djinn.errors import RefusedError
from djinn_plugins.cluster.directory.naming import NamedPlaces
from djinn_plugins.cluster.directory.ordering import ServerOrders
from djinn_plugins.cluster.messages import ListedServer, LoadReport, Resolve

__all__ = ("MAX_NAMED", "STALE_S", "JoinedServer", "ServerListing")

STALE_S = 10.0
"""A server that has not reported its load for so long is not named."""
SETTLING_S = 3.0
"""How long a client that was led to a server counts as its session, before the server's own report includes it."""
MAX_NAMED = 8


@attrs.define(eq=False)
class JoinedServer:
    """A server that has joined.

    Attributes:
        address: Where clients reach it.
        load: Its last report; ``None`` before the first.
        reported_s: When that arrived.
        led_s: When clients were led there, not long ago.
        models: Those of the last report.
        orders: Asks it to drain; ``None`` until it is accepted.
    """

    address: str
    load: LoadReport | None = None
    reported_s: float = 0.0
    led_s: list[float] = attrs.field(factory=list)
    models: frozenset[str] = frozenset()
    orders: ServerOrders | None = None


class ServerListing:
    """The servers of a cluster.

    Args:
        clock: Returns the time in seconds.

    Attributes:
        names: Which of them has which named session.

    Concurrency:
        One thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[str, JoinedServer] = {}
        self.names = NamedPlaces(clock)

    def __len__(self) -> int:
        return len(self._members)

    def join(self, address: str) -> JoinedServer:
        """Add a server. One that joins again replaces its previous entry."""
        self._members[address] = member = JoinedServer(address)
        return member

    def leave(self, member: JoinedServer) -> None:
        """Remove a server, unless it has joined again."""
        if self._members.get(member.address) is member:
            del self._members[member.address]
            self.names.left(member.address)

    def find(self, address: str) -> JoinedServer | None:
        """Return a server by its address."""
        return self._members.get(address)

    def report(self, member: JoinedServer, load: LoadReport) -> None:
        """Replace a server's load."""
        if member.load is None or member.load.models != load.models:
            member.models = frozenset(load.models)
        member.load, member.reported_s = load, self._clock()
        self.names.reported(member.address, load.named, load.began)

    def all(self) -> Iterator[ListedServer]:
        """List all servers that have reported a load, by address."""
        for address in sorted(self._members):
            member = self._members[address]
            if member.load is not None:
                yield ListedServer(address, member.load)

    def choose(self, wanted: Resolve, digest: str = "") -> tuple[ListedServer, ...]:
        """Name servers to a client, the best one first, and count the client as a session of that one.

        Servers are preferred that the client was not given a moment ago, then those that have all its models, then
        those with enough memory left, then those with the fewest sessions, then those with the least memory in use. For
        a named session that a server has, it is that server and no other one.

        Args:
            wanted: The client's question.
            digest: What stands for the named session that it asks for; empty if it asks for none.

        Raises:
            RefusedError: The server that has the named session is not there.
        """
        now = self._clock()
        place = self.names.place_of(digest, wanted) if digest else None
        if place is not None and (member := self._members.get(place)) is not None and member.load is not None:
            if why := member.load.problem or ("" if now - member.reported_s < STALE_S else "It does not report."):
                raise RefusedError(f"The server {place} has the session {wanted.session!r}, and no session can begin "
                                   f"there: {why}", hint="Try again later; `djinn cluster status` shows the servers.")
            member.led_s.append(now)
            return (ListedServer(place, metrics=member.load.metrics),)
        models = frozenset(wanted.models)
        best = heapq.nsmallest(MAX_NAMED, (
            (self._rank(member, member.load, wanted, models, now), member.address) for member in self._members.values()
            if member.load is not None and not member.load.problem and now - member.reported_s < STALE_S))
        if best:
            self._members[best[0][1]].led_s.append(now)
            if digest:
                self.names.led(digest, best[0][1])
        return tuple(ListedServer(member.address, metrics=member.load.metrics if member.load is not None else "")
                     for member in (self._members[address] for _, address in best))

    @staticmethod
    def _rank(member: JoinedServer, load: LoadReport, wanted: Resolve, models: frozenset[str], now: float
              ) -> tuple[bool, bool, bool, int, float]:
        if member.led_s:
            member.led_s = [led_s for led_s in member.led_s if now - led_s < SETTLING_S]
        lacks_memory = 0 < load.limit_bytes < load.held_bytes + wanted.memory_bytes
        part = load.held_bytes / load.limit_bytes if load.limit_bytes else 0.0
        return (member.address in wanted.recent, not models <= member.models, lacks_memory,
                load.sessions + len(member.led_s), part)
