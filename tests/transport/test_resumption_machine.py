"""Whatever connections break, each batch is executed once and each request answered once; broken ends are noticed."""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from djinn.errors import ProtocolError, RefusedError
from djinn_plugins.transport.resumable_channel import ResumableSessions
from djinn_plugins.transport.resumption import (
    ACK_BYTES,
    MAX_BUFFERED_BYTES,
    ClientEnd,
    ServerEnd,
)

LEASE_S = 30.0
GREETING = 1
SELDOM = st.sampled_from([False, False, False, False, True])
"""What ends a life must not end most of them before anything can go wrong in it."""


@attrs.define(eq=False)
class Wire:
    """One connection: what is on its way."""

    up: deque[tuple[int, Any]] = attrs.Factory(deque)
    down: deque[tuple[str, int, Any]] = attrs.Factory(deque)


@attrs.define(eq=False)
class Server:
    """One session at the server, as a `ResumableChannel` holds it; a batch adds its content."""

    end: ServerEnd[int]
    wire: Wire | None
    value: int = 0
    running: tuple[int, Any] | None = None
    executed: list[tuple[int, Any]] = attrs.Factory(list)
    held_bytes: int = 0

    def hear(self, number: int, content: Any) -> None:
        """A batch was read. The session's one thread carries nothing else out meanwhile."""
        amount, asks, size_bytes = content
        if self.end.take(number, hash((amount, asks)), size_bytes):
            self.running = number, content
            self.held_bytes += size_bytes
        if self.end.ack_due and self.wire is not None:
            self.wire.down.append(("ack", self.end.acked(), None))

    def run(self) -> None:
        """Carry out what was read."""
        assert self.running is not None
        (number, (amount, asks, _)), self.running = self.running, None
        self.executed.append((number, amount))
        self.value += amount
        if asks:
            self.end.finish(number, self.value)
            self.give()

    def give(self) -> None:
        """Send the answer that this connection has not carried."""
        kept = self.end.to_give()
        if self.wire is not None and kept is not None:
            self.wire.down.append(("answer", *kept))
            self.end.delivered()


@attrs.define(eq=False)
class Client:
    """One client, and the sums that it expects."""

    end: ClientEnd[Any]
    tenant: int
    key: bytes
    server: Server
    wire: Wire | None
    total: int = 0
    awaited: tuple[int, int] | None = None
    sent: list[tuple[int, Any]] = attrs.Factory(list)
    released_bytes: int = 0
    is_over: bool = False


class Life(RuleBasedStateMachine):
    """Clients of two tenants, whose connections and servers break."""

    client_end: Any = ClientEnd
    server_end: Any = ServerEnd

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.books = [ResumableSessions(), ResumableSessions()]
        self.sessions: dict[bytes, Server] = {}
        self.clients: list[Client] = []

    def pick(self, data: st.DataObject, **wanted: bool) -> Client | None:
        found = [client for client in self.clients
                 if all(getattr(self, f"is_{name}")(client) is value for name, value in wanted.items())]
        return data.draw(st.sampled_from(found)) if found else None

    @staticmethod
    def is_connected(client: Client) -> bool:
        return client.wire is not None

    @staticmethod
    def is_over(client: Client) -> bool:
        return client.is_over

    @precondition(lambda self: sum(not client.is_over for client in self.clients) < 3)
    @rule(tenant=st.integers(0, 1))
    def connect(self, tenant: int) -> None:
        wire = Wire()
        server = Server(self.server_end(GREETING, LEASE_S), wire)
        key = self.books[tenant].add(server)  # type: ignore[arg-type]  # holds what it is given
        self.sessions[key] = server
        end = self.client_end(GREETING, 8 * ACK_BYTES, lambda frame: None)
        self.clients.append(Client(end, tenant, key, server, wire))

    @rule(data=st.data(), amount=st.integers(1, 9), asks=st.booleans(),
          size_bytes=st.sampled_from([100, 5000, MAX_BUFFERED_BYTES + 1]))
    def send(self, data: st.DataObject, amount: int, asks: bool, size_bytes: int) -> None:
        client = self.pick(data, over=False)
        if client is None or client.awaited is not None or client.end.is_full:
            return
        content = amount, asks, size_bytes
        number = client.end.send((client.end.sent + 1, content), size_bytes, is_borrowed=asks)
        client.sent.append((number, content))
        client.total += amount
        if asks:
            client.awaited = number, client.total
        if client.wire is not None:
            client.wire.up.append((number, content))

    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        """A frame arrives; perhaps it comes twice."""
        client = self.pick(data, connected=True)
        if client is None or client.wire is not client.server.wire or client.server.running is not None:
            return
        if client.wire is not None and client.wire.up:
            frame = client.wire.up[0] if again else client.wire.up.popleft()
            client.server.hear(*frame)

    @rule(data=st.data(), back=st.integers(0, 5))
    def repeat(self, data: st.DataObject, back: int) -> None:
        """Something arrives that was sent long ago."""
        client = self.pick(data, over=False)
        if client is None or client.server.running is not None or not client.sent:
            return
        number, content = client.sent[max(0, len(client.sent) - 1 - back)]
        if number <= client.server.end.received:
            client.server.hear(number, content)

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        busy = [client.server for client in self.clients if client.server.running is not None]
        if busy:
            data.draw(st.sampled_from(busy)).run()

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        client = self.pick(data, connected=True)
        if client is not None and client.wire is not None and client.wire.down:
            self.take_in(client, *client.wire.down.popleft())

    @staticmethod
    def take_in(client: Client, kind: str, number: int, answer: Any) -> None:
        if kind == "ack":
            client.end.acknowledged(number)
        elif client.end.answer(number):
            assert client.awaited == (number, answer), "every request gets its own answer"
            client.awaited = None

    @rule(data=st.data(), notices=st.booleans())
    def drop(self, data: st.DataObject, notices: bool) -> None:
        """A connection breaks; the server may not notice before the client is back."""
        client = self.pick(data, connected=True)
        if client is None:
            return
        client.wire = None
        if notices:
            client.server.wire = None
            client.server.end.lost(self.now)

    @rule(data=st.data(), is_late=st.booleans())
    def reconnect(self, data: st.DataObject, is_late: bool) -> None:
        client = self.pick(data, connected=False, over=False)
        if client is not None:
            self.go_on(client, is_late=is_late)

    def go_on(self, client: Client, *, is_late: bool = False) -> None:
        try:
            server: Any = self.books[client.tenant].find(client.key)
        except RefusedError:
            assert client.key not in self.sessions, "a session that lives is found"
            client.is_over = True
            return
        assert server is client.server
        before, received = server.wire, server.end.received
        server.end.check(client.end.answered)
        server.end.lost(self.now)
        lacking = client.end.lacking(received)
        server.end.found(client.end.answered)
        server.wire = client.wire = Wire(up=deque(lacking))
        if is_late and before is not None and before.up and server.running is None:
            # The session's thread had read it from the old connection, and had not taken it in.
            server.hear(*before.up.popleft())
        server.give()

    @rule(data=st.data(), is_so=SELDOM)
    def crash_client(self, data: st.DataObject, is_so: bool) -> None:
        client = self.pick(data, over=False) if is_so else None
        if client is not None:
            client.wire, client.is_over = None, True
            client.server.wire = None
            client.server.end.lost(self.now)

    @rule(tenant=st.integers(0, 1), is_so=SELDOM)
    def crash_server(self, tenant: int, is_so: bool) -> None:
        for client in self.clients:
            if is_so and client.tenant == tenant:
                client.wire = None
                self.end_session(client)

    def end_session(self, client: Client) -> None:
        self.books[client.tenant].remove(client.key)
        self.sessions.pop(client.key, None)
        client.server.held_bytes, client.server.running = 0, None

    @rule(duration_s=st.sampled_from([0.1, 1.0, LEASE_S / 3, LEASE_S]))
    def tick(self, duration_s: float) -> None:
        self.now += duration_s
        for client in self.clients:
            if client.key in self.sessions and client.server.end.left_s(self.now) <= 0:
                self.end_session(client)

    @rule(data=st.data())
    def try_another_tenants(self, data: st.DataObject) -> None:
        client = self.pick(data)
        if client is not None:
            with pytest.raises(RefusedError):
                self.books[1 - client.tenant].find(client.key)

    @invariant()
    def once_and_in_order(self) -> None:
        for client in self.clients:
            wanted = [(number, content[0]) for number, content in client.sent]
            assert client.server.executed == wanted[:len(client.server.executed)], "one execution per number, in order"

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        for client in self.clients:
            end = client.end
            kept = [(content[2], content[1]) for number, content in client.sent if number > end.acked]
            assert end.kept_bytes == sum(size for size, _ in kept)
            assert end.copied_bytes == sum(size for size, is_borrowed in kept if not is_borrowed)
            assert end.kept == len(kept)
            taken = [content[2] for number, content in client.sent if number <= client.server.end.received]
            assert client.server.held_bytes == (sum(taken) if client.key in self.sessions else 0)

    def teardown(self) -> None:
        """Everything is well in the end: what was asked is answered, and what was sent is carried out."""
        for client in self.clients:
            if client.is_over:
                continue
            client.wire = None
            self.go_on(client)
            while client.wire is not None and (client.wire.up or client.wire.down or client.server.running):
                if client.server.running is not None:
                    client.server.run()
                elif client.wire.up:
                    client.server.hear(*client.wire.up.popleft())
                else:
                    self.take_in(client, *client.wire.down.popleft())
            if not client.is_over:
                assert client.awaited is None, "every request gets an answer"
                assert client.server.value == client.total
                assert len(client.server.executed) == len(client.sent)


TestLife = Life.TestCase
TestLife.settings = settings(stateful_step_count=60, deadline=None)


class TakesAll(ServerEnd[Any]):
    def take(self, number: int, digest: int, size_bytes: int = 0, *, is_cancelled: bool = False) -> bool:
        return super().take(number, digest, size_bytes) or True


class ForgetsAnswers(ServerEnd[Any]):
    def lost(self, now: float) -> None:
        super().lost(now)
        self._answers.clear()


class GivesOld(ServerEnd[Any]):
    def to_give(self) -> tuple[int, Any] | None:
        kept = super().to_give()
        return None if kept is None else (kept[0], kept[1] - 1)


class SendsNothingAgain(ClientEnd[Any]):
    def lacking(self, received: int) -> list[Any]:
        super().lacking(received)
        return []


class SendsAllAgain(ClientEnd[Any]):
    def lacking(self, received: int) -> list[Any]:
        frames = [frame for _, frame, _, _ in self._kept if frame is not None]
        super().lacking(received)
        return [(number + 1, content) for number, content in frames]


class NeverLetsGo(ClientEnd[Any]):
    def acknowledged(self, number: int) -> None:
        before = self.kept_bytes
        super().acknowledged(number)
        self.kept_bytes = before


@pytest.mark.parametrize("broken", [TakesAll, ForgetsAnswers, GivesOld, SendsNothingAgain, SendsAllAgain, NeverLetsGo])
def test_ends_that_are_broken_are_found_out(broken: type) -> None:
    which = "server_end" if issubclass(broken, ServerEnd) else "client_end"
    machine = type("Broken", (Life,), {which: broken})
    with pytest.raises((AssertionError, ProtocolError)):
        run_state_machine_as_test(machine, settings=settings(
            max_examples=5000, stateful_step_count=60, deadline=None, database=None, phases=[Phase.generate]))
