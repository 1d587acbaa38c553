"""Hours of blackouts in seconds: many clients on a simulated network, in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from djinn.errors import RefusedError
from djinn_plugins.transport.resumable_channel import ResumableSessions
from djinn_plugins.transport.resumption import ClientEnd, Patience, ServerEnd

LEASE_S = 30.0
VANISHED_S = 15.0
"""After so long, whoever waits notices that nobody is there; see `djinn_plugins.transport.tcp.sockets.KEEPALIVE`."""
GREETING = 1
DELAY_S = 0.02


class BrokenError(Exception):
    """The connection is gone."""


@attrs.define(eq=False)
class Network:
    """Is there, or is not.

    Attributes:
        is_dark: Whether nothing arrives.
    """

    choose: random.Random
    is_dark: bool = False
    lines: list[Line] = attrs.Factory(list)

    async def black_out(self, every_s: float, for_s: float, times: int) -> None:
        """Go dark again and again. Some connections are reset, others are silent until somebody gives up."""
        for _ in range(times):
            await trio.sleep(every_s - for_s)
            self.is_dark = True
            for line in self.lines:
                line.is_lost = True
                if self.choose.random() < 0.5:
                    line.end()
            self.lines.clear()
            await trio.sleep(for_s)
            self.is_dark = False

    def connect(self) -> Line | None:
        """Make a connection, if that is possible."""
        if self.is_dark:
            return None
        line = Line(self.choose)
        self.lines.append(line)
        return line


class Line:
    """A connection of two directions. Now and then something comes twice, or from a connection that is gone."""

    def __init__(self, choose: random.Random) -> None:
        self.is_lost = False
        self._choose = choose
        self._ways = {name: trio.open_memory_channel[Any](math.inf) for name in ("up", "down")}

    def send(self, way: str, what: Any) -> None:
        """Send something, which arrives if the connection still works by then."""
        try:
            for _ in range(1 if self._choose.random() < 0.98 else 2):
                self._ways[way][0].send_nowait((trio.current_time() + DELAY_S, what))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise BrokenError from None

    async def receive(self, way: str) -> Any:
        """Wait for something.

        Raises:
            BrokenError: The connection is gone, as far as this side can tell.
        """
        try:
            arrives_at, what = await self._ways[way][1].receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise BrokenError from None
        await trio.sleep_until(arrives_at)
        if self.is_lost:
            late_s = self._choose.uniform(0, VANISHED_S)
            await trio.sleep(late_s)
            if late_s > 5:
                # Otherwise it had been read before, and nobody had found the time to look at it.
                raise BrokenError
        return what

    def end(self) -> None:
        """Have both sides notice."""
        for sender, receiver in self._ways.values():
            sender.close()
            receiver.close()


@attrs.define(eq=False)
class Session:
    """The server's side: a counter that each batch adds to."""

    end: ServerEnd[int]
    line: Line | None
    changed: trio.Event = attrs.Factory(trio.Event)
    value: int = 0
    executed: int = 0
    held_bytes: int = 0
    is_over: bool = False

    def take_up(self, line: Line, answered: int) -> int:
        """Go on over another connection."""
        self.end.check(answered)
        self.end.lost(trio.current_time())
        received = self.end.received
        before, self.line = self.line, line
        if before is not None:
            before.end()
        self.end.found(answered)
        self.changed.set()
        return received

    async def serve(self, choose: random.Random) -> None:
        """Live until nobody comes any more."""
        while not self.is_over:
            line = self.line
            if line is None:
                await self.await_line()
                continue
            try:
                self.give(line)
                with trio.move_on_after(VANISHED_S + LEASE_S) as scope:
                    what = await line.receive("up")
                if scope.cancelled_caught:
                    # As keepalive finds out about an idle connection; a living client asks more often.
                    raise BrokenError
            except BrokenError:
                if line is self.line:
                    self.line = None
                    self.end.lost(trio.current_time())
                continue
            if what == "goodbye":
                break
            number, amount, asks, size_bytes = what
            if not self.end.take(number, hash((amount, asks)), size_bytes):
                continue
            self.held_bytes += size_bytes
            await trio.sleep(choose.expovariate(5.0))
            self.value += amount
            self.executed += 1
            if self.end.ack_due and line is self.line:
                line.send("down", ("ack", self.end.acked(), None)) if not line.is_lost else None
            if asks:
                self.end.finish(number, self.value)
        self.is_over, self.held_bytes = True, 0

    async def await_line(self) -> None:
        """Wait for another connection until the lease is over."""
        self.changed = trio.Event()
        with trio.move_on_after(max(0.0, self.end.left_s(trio.current_time()))):
            await self.changed.wait()
        if self.line is None and self.end.left_s(trio.current_time()) <= 0:
            self.is_over = True

    def give(self, line: Line) -> None:
        """Send the answer that this connection has not carried."""
        kept = self.end.to_give()
        if kept is not None:
            self.end.delivered()
            line.send("down", ("answer", *kept))


class Place:
    """Where sessions live."""

    def __init__(self, nursery: trio.Nursery, choose: random.Random) -> None:
        self.book = ResumableSessions()
        self.sessions: list[Session] = []
        self._nursery = nursery
        self._choose = choose

    def begin(self, line: Line) -> bytes:
        """Begin a session and return its key."""
        session = Session(ServerEnd(GREETING, LEASE_S), line)
        key = self.book.add(session)  # type: ignore[arg-type]  # holds what it is given
        self.sessions.append(session)

        async def live() -> None:
            await session.serve(self._choose)
            self.book.remove(key)

        self._nursery.start_soon(live)
        return key


@attrs.define(eq=False)
class Client:
    """The client's side."""

    network: Network
    place: Place
    choose: random.Random
    end: ClientEnd[Any] = attrs.Factory(lambda: ClientEnd(GREETING, 2**23))
    line: Line | None = None
    key: bytes = b""
    total: int = 0
    reconnections: int = 0

    async def live(self, steps: int, *, dies_at: int = -1) -> None:
        """Add to the counter, and ask for it now and then; perhaps die."""
        while self.line is None:
            self.line = self.network.connect()
            await trio.sleep(0.1)
        self.key = self.place.begin(self.line)
        for step in range(steps):
            if step == dies_at:
                self.line.is_lost = True
                return
            asks = step % 3 == 2
            amount, size_bytes = self.choose.randrange(1, 9), self.choose.choice([100, 2**18])
            number = self.end.send((self.end.sent + 1, amount, asks, size_bytes), size_bytes)
            self.total += amount
            await self.steadily(lambda line, number=number, amount=amount, asks=asks, size_bytes=size_bytes:
                                line.send("up", (number, amount, asks, size_bytes)))
            if asks:
                assert await self.answer() == self.total, "every request gets its own answer"
            # The server may notice 5 s after a batch that the connection broke, and the client 15 s after its request,
            # which may be its third batch from there. Then there are 5 s without a network, and 5 to spare.
            await trio.sleep(min(self.choose.expovariate(0.5), LEASE_S / 12))
        await self.steadily(lambda line: line.send("up", "goodbye"))

    async def steadily(self, act: Callable[[Line], object]) -> None:
        try:
            assert self.line is not None
            act(self.line)
        except BrokenError:
            await self.go_on()

    async def answer(self) -> int:
        """Wait for an answer, over as many connections as it takes."""
        while True:
            try:
                assert self.line is not None
                with trio.move_on_after(VANISHED_S) as scope:
                    kind, number, value = await self.line.receive("down")
                if scope.cancelled_caught:
                    if not self.line.is_lost:
                        continue
                    raise BrokenError
            except BrokenError:
                await self.go_on()
                continue
            if kind == "ack":
                self.end.acknowledged(number)
            elif self.end.answer(number):
                return int(value)

    async def go_on(self) -> None:
        patience = Patience(trio.current_time(), LEASE_S, self.choose.random)
        while True:
            attempt_s = patience.attempt_s(trio.current_time())
            assert attempt_s > 0, "the network is back before the lease is over"
            line = self.network.connect()
            if line is None:
                await trio.sleep(min(attempt_s, 1.0))
            else:
                await trio.sleep(2 * DELAY_S)
                session: Any = self.place.book.find(self.key)
                taken = session.take_up(line, self.end.answered)
                self.line = line
                try:
                    for frame in self.end.lacking(taken):
                        line.send("up", frame)
                except BrokenError:
                    continue
                self.reconnections += 1
                return
            pause_s = patience.pause_s(trio.current_time())
            assert pause_s is not None
            await trio.sleep(pause_s)


@pytest.mark.parametrize("seed", [1, 2])
def test_hours_of_blackouts_five_seconds_of_every_twenty(seed: int) -> None:
    """Each batch of each client is carried out once, and nothing is left of those who died or said goodbye."""
    choose = random.Random(seed)
    network = Network(choose)
    clients: list[Client] = []
    steps, dead = 1500, {2: 200, 5: 700}
    took_s = 0.0

    async def run() -> None:
        nonlocal took_s
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.black_out, 20.0, 5.0, 1000)
            async with trio.open_nursery() as serving:
                place = Place(serving, choose)
                async with trio.open_nursery() as using:
                    for number in range(8):
                        clients.append(Client(network, place, choose))
                        using.start_soon(lambda number=number: clients[number].live(
                            steps, dies_at=dead.get(number, -1)))
            # Every session has come to its end by itself.
            took_s = trio.current_time()
            nursery.cancel_scope.cancel()
        assert all(session.is_over and not session.held_bytes for session in place.sessions)
        values = [session.value for session in place.sessions]
        for number, client in enumerate(clients):
            with pytest.raises(RefusedError):
                place.book.find(client.key)
            if number not in dead:
                assert client.total in values
        assert sorted(session.executed for session in place.sessions)[2:] == [steps] * 6

    clock = trio.testing.MockClock(autojump_threshold=0)
    begin = clock.current_time()
    trio.run(run, clock=clock)
    reconnections = sum(client.reconnections for client in clients)
    print(f"{(took_s - begin) / 3600:.1f} hours, {reconnections} reconnections")
    assert took_s - begin > 3600
    assert reconnections > 500
