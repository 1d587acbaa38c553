"""Sessions of a cluster that is not there: they come, the directory leads each to a server, and servers fail.

The directory's choice is the real one, `djinn_plugins.cluster.directory.choosing.ServerListing`, by a clock that is
simulated too; so are the reports of load every second and the addresses that a client remembers. What else is
simulated: a server that works on one request at a time, in the order in which they come; sessions that ask, wait for
the answer, pause, and ask again; servers that fail, whose sessions find another one, where their work is repeated
first. What is not: the time that messages take, memory, requests that slow each other down.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable

import attrs

from djinn_plugins.cluster.directory.announcing import EVERY_S
from djinn_plugins.cluster.directory.choosing import JoinedServer, ServerListing
from djinn_plugins.cluster.messages import LoadReport, Resolve
from djinn_plugins.cluster.resolving import RECENT_S

RECENT = 16
"""How many addresses a client remembers."""
RETRY_S = 1.0
"""When a client asks again that found no server."""


@attrs.frozen
class Workload:
    """What clients do.

    Attributes:
        load: Part of all servers' time that the requests need.
        service_s: Mean time that a server needs for a request; exponentially distributed.
        pause_s: Mean pause between an answer and the next request; exponentially distributed.
        requests: Mean number of requests of a session; geometrically distributed.
        replayed_s: The longest work that is repeated when a session's server has failed.
    """

    load: float = 0.7
    service_s: float = 0.2
    pause_s: float = 2.0
    requests: float = 30.0
    replayed_s: float = 3.0


@attrs.frozen
class Failure:
    """Servers that fail at one time.

    Attributes:
        at_s: When.
        part: Which part of the servers.
        back_s: How long until they are there again.
        unnoticed_s: How long until the connections to them are known to be broken; 0 for processes that are killed,
            whose connections the system closes.
    """

    at_s: float
    part: float
    back_s: float
    unnoticed_s: float = 0.0


@attrs.frozen
class Answer:
    """A request that was answered.

    Attributes:
        asked_s: When its client asked.
        waited_s: How long it took, without the time that the server needed for it.
    """

    asked_s: float
    waited_s: float


@attrs.frozen
class ClusterRun:
    """What happened.

    Attributes:
        answers: In the order in which they were given.
        asked: How many requests there were until the end, those that wait still included.
        sessions: How many sessions there were.
        interrupted_s: For each session whose server failed: how long until another one had repeated its work.
        choosing_s: Processor time of each choice of the directory.
        most: The largest number of sessions on a server over the mean, at the end.
    """

    answers: tuple[Answer, ...]
    asked: int
    sessions: int
    interrupted_s: tuple[float, ...]
    choosing_s: tuple[float, ...]
    most: float


@attrs.define(eq=False)
class _Server:
    address: str
    member: JoinedServer | None = None
    is_up: bool = True
    sessions: dict[_Session, None] = attrs.field(factory=dict)
    queue: deque[_Session] = attrs.field(factory=deque)
    life: int = 0
    """How often it has failed: what was begun in an earlier life does not end."""


@attrs.define(eq=False)
class _Session:
    left: int
    server: _Server | None = None
    recent: list[tuple[float, str]] = attrs.field(factory=list)
    asked_s: float | None = None
    """When it has asked the request that it waits for."""
    needs_s: float = 0.0
    """Time that the request needs."""
    replay_s: float = 0.0
    """Time that the work needs which has to be repeated first."""
    done_s: float = 0.0
    """Work that would have to be repeated."""
    broken_s: float | None = None


def simulate_sessions(
    servers: int, workload: Workload, length_s: float, *, failures: tuple[Failure, ...] = (), seed: int = 0,
) -> ClusterRun:
    """Let sessions come and go for a while, as many from the beginning as there are on average.

    Args:
        servers: How many servers there are.
        workload: What clients do.
        length_s: For how long.
        failures: Which servers fail.
        seed: Of everything that is drawn.
    """
    return _Cluster(servers, workload, failures, seed).run(length_s)


class _Cluster:
    def __init__(self, servers: int, workload: Workload, failures: tuple[Failure, ...], seed: int) -> None:
        self._workload = workload
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._listing = ServerListing(lambda: self._now_s)
        self._servers = {f"tcp://server-{number}:7070": _Server(f"tcp://server-{number}:7070")
                         for number in range(servers)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._answers: list[Answer] = []
        self._asked = self._sessions = 0
        self._interrupted_s: list[float] = []
        self._choosing_s: list[float] = []
        self._failures = failures
        self._rate = workload.load * servers / (workload.requests * workload.service_s)

    def run(self, length_s: float) -> ClusterRun:
        for server in self._servers.values():
            self._join(server)
            self._after(self._random.uniform(0, EVERY_S), lambda server=server: self._report(server))
        for failure in self._failures:
            self._after(failure.at_s, lambda failure=failure: self._fail(failure))
        work = self._workload
        there = self._rate * work.requests * (work.pause_s + work.service_s / (1 - work.load))
        for _ in range(round(there) if work.pause_s else 0):
            # Spread over the time between two requests, so that they do not all ask at once.
            self._after(self._random.uniform(0, work.pause_s), lambda: self._come(ages=True))
        self._after(self._random.expovariate(self._rate), self._arrive)
        while self._events and self._events[0][0] <= length_s:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
        counts = [len(server.sessions) for server in self._servers.values() if server.is_up]
        return ClusterRun(tuple(self._answers), self._asked, self._sessions, tuple(self._interrupted_s),
                          tuple(self._choosing_s), max(counts) / max(sum(counts) / len(counts), 1e-9))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._numbers), act))

    def _join(self, server: _Server) -> None:
        server.member = self._listing.join(server.address)
        self._listing.report(server.member, LoadReport())

    def _report(self, server: _Server) -> None:
        """Report the load every second, unless the server has failed."""
        if server.is_up and server.member is not None:
            self._listing.report(server.member, LoadReport(sessions=len(server.sessions)))
        self._after(EVERY_S, lambda: self._report(server))

    def _arrive(self) -> None:
        self._come()
        self._after(self._random.expovariate(self._rate), self._arrive)

    def _come(self, *, ages: bool = False) -> None:
        """A session comes; one that is older has replayed work of its past."""
        self._sessions += 1
        ends = 1 / self._workload.requests
        left = 1 if ends >= 1 else 1 + int(math.log(1 - self._random.random()) / math.log(1 - ends))
        session = _Session(left, done_s=self._workload.replayed_s if ages else 0.0)
        self._resolve(session)
        self._ask(session)

    def _resolve(self, session: _Session) -> None:
        """Find a server for a session, as a client does that cannot reach the one before."""
        session.recent = [(at_s, address) for at_s, address in session.recent if at_s > self._now_s - RECENT_S]
        recent = tuple(dict.fromkeys(address for _, address in session.recent[-RECENT:]))
        began_s = time.thread_time()
        found = self._listing.choose(Resolve("", recent=recent))
        self._choosing_s.append(time.thread_time() - began_s)
        if not found:
            self._after(RETRY_S, lambda: self._resolve(session))
            return
        server = self._servers[found[0].address]
        session.recent.append((self._now_s, server.address))
        if not server.is_up:
            # It does not answer, and is listed still.
            self._after(RETRY_S, lambda: self._resolve(session))
            return
        session.server = server
        server.sessions[session] = None
        if session.asked_s is not None or session.replay_s:
            self._enqueue(session)

    def _ask(self, session: _Session) -> None:
        self._asked += 1
        session.asked_s = self._now_s
        session.needs_s = self._random.expovariate(1 / self._workload.service_s)
        if session.server is not None and not session.replay_s:
            self._enqueue(session)

    def _enqueue(self, session: _Session) -> None:
        assert session.server is not None
        session.server.queue.append(session)
        if len(session.server.queue) == 1:
            self._work(session.server)

    def _work(self, server: _Server) -> None:
        """Work on the request that has come first."""
        session, life = server.queue[0], server.life
        needs_s = session.replay_s + (session.needs_s if session.asked_s is not None else 0.0)
        self._after(needs_s, lambda: self._worked(server, session, life))

    def _worked(self, server: _Server, session: _Session, life: int) -> None:
        if server.life != life:
            return
        server.queue.popleft()
        if server.queue:
            self._work(server)
        if session.broken_s is not None:
            self._interrupted_s.append(self._now_s - session.broken_s)
            session.broken_s = None
        session.replay_s = 0.0
        if session.asked_s is None:
            return
        self._answers.append(Answer(session.asked_s, self._now_s - session.asked_s - session.needs_s))
        session.done_s = min(self._workload.replayed_s, session.done_s + session.needs_s)
        session.asked_s = None
        session.left -= 1
        if session.left:
            self._after(self._pause_s(), lambda: self._ask(session))
        else:
            server.sessions.pop(session, None)

    def _pause_s(self) -> float:
        return self._random.expovariate(1 / self._workload.pause_s) if self._workload.pause_s else 0.0

    def _fail(self, failure: Failure) -> None:
        up = [server for server in self._servers.values() if server.is_up]
        for server in self._random.sample(up, round(failure.part * len(up))):
            server.is_up, server.life = False, server.life + 1
            if not failure.unnoticed_s and server.member is not None:
                self._listing.leave(server.member)
            sessions = list(server.sessions)
            server.sessions.clear()
            server.queue.clear()
            for session in sessions:
                session.server, session.broken_s = None, self._now_s
                session.replay_s = session.done_s
                self._after(failure.unnoticed_s, lambda session=session: self._resolve(session))
            self._after(failure.back_s, lambda server=server: self._return(server))

    def _return(self, server: _Server) -> None:
        server.is_up = True
        self._join(server)
