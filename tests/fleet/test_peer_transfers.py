"""Values from server to server: two processes, one client with a connection to each."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch
from support.servers.connection_options import connect_options

from djinn.errors import RefusedError
from djinn.kinds.transport import ConnectOptions
from djinn.wire import messages
from djinn.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Command,
    Layout,
    Peer,
    PeerHello,
    Plain,
    Poisoned,
    Receive,
    Result,
    Seed,
    Send,
    TensorHeader,
    Upload,
    ValueTransfer,
    Welcome,
)
from djinn.wire.tensors import header_of
from djinn_plugins.common.wire.frames import encode_head
from djinn_plugins.transport.tcp.client import SocketConnection, connect, connect_tls, connect_unix
from djinn_plugins.transport.tcp.transport import TcpTransport

SOON_S = 10.0
SHORT_S = 0.3
LARGE = torch.arange(25 * 10**6, dtype=torch.int32)
"""100 MB."""
ONES = torch.ones(4)


@attrs.define
class Session:
    """A session on a server, and the client's connection to it."""

    address: str
    connection: SocketConnection

    @property
    def welcome(self) -> Welcome:
        return self.connection.welcome

    @property
    def name(self) -> str:
        return self.welcome.session

    def as_peer(self, number: int = 1) -> Peer:
        return Peer(number, self.address, self.welcome.mailbox)

    def submit(self, *commands: Command) -> None:
        self.connection.submit(Batch(list(commands)), [])

    def ask(self, *commands: Command, fetch: tuple[int, ...] = ()) -> tuple[Result, list[torch.Tensor]]:
        return self.connection.request(Batch(list(commands), fetch=fetch, synchronize=True), [])

    def upload(self, handle: int, tensor: torch.Tensor) -> None:
        result, _ = self.connection.request(Batch([Upload(handle, header_of(tensor))], synchronize=True), [tensor])
        assert result.failures == ()

    def failures(self, *commands: Command) -> list[tuple[str, str]]:
        return [(failure.kind, failure.message) for failure in self.ask(*commands)[0].failures]

    def lives(self) -> None:
        self.upload(1000, ONES)
        result, [got] = self.ask(fetch=(1000,))
        assert result.failures == ()
        assert torch.equal(got, ONES)


OpenSession = Callable[..., Session]


@pytest.fixture
def open_session() -> Iterator[OpenSession]:
    opened: list[Session] = []

    def open_one(server: Any, token: str = "") -> Session:
        opener = connect_unix if server.address.startswith("unix:") else connect
        opened.append(Session(server.address, opener(server.address, ConnectOptions(token=token))))
        return opened[-1]

    yield open_one
    for session in opened:
        session.connection.close()


@pytest.fixture
def pair(server: Any, second_server: Any, open_session: OpenSession) -> tuple[Session, Session]:
    return open_session(server), open_session(second_server)


def test_values_go_over_and_back(pair: tuple[Session, Session]) -> None:
    here, there = pair
    here.upload(1, torch.arange(6.0).view(2, 3))
    assert here.failures(there.as_peer(1), Send(1, 1, 1), Seed(7), Send(0, 1, 2)) == []
    result, data = there.ask(
        Receive(5, 1, here.name), Receive(0, 2, here.name), here.as_peer(9), Send(5, 9, 1), fetch=(5, 0))
    assert result.failures == ()
    assert torch.equal(data[0], torch.arange(6.0).view(2, 3))
    result, [again, state] = here.ask(Receive(2, 1, there.name), fetch=(2, 0))
    assert torch.equal(again, data[0])
    assert torch.equal(state, data[1])


def test_a_receive_waits_for_what_is_sent_later(pair: tuple[Session, Session]) -> None:
    here, there = pair
    here.upload(1, ONES)
    assert here.failures(there.as_peer()) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(there.ask, Receive(5, 1, here.name), fetch=(5,))
        time.sleep(SHORT_S)
        assert not waiting.done()
        here.submit(Send(1, 1, 1))
        _, [got] = waiting.result(SOON_S)
    assert torch.equal(got, ONES)


def test_sessions_of_one_server(server: Any, open_session: OpenSession) -> None:
    here, there = open_session(server), open_session(server)
    here.upload(1, ONES)
    assert here.failures(there.as_peer(), Send(1, 1, 1)) == []
    here.connection.close()
    result, [got] = there.ask(Receive(5, 1, here.name), Receive(6, 2, here.name), fetch=(5,))
    assert torch.equal(got, ONES)
    assert [failure.kind for failure in result.failures] == ["PeerError"]


def test_a_large_value_that_was_sent_before_its_sender_left(pair: tuple[Session, Session]) -> None:
    here, there = pair
    here.upload(1, LARGE)
    here.submit(there.as_peer(), Send(1, 1, 1))
    here.connection.close()
    _, [got] = there.ask(Receive(5, 1, here.name), fetch=(5,))
    assert torch.equal(got, LARGE)


def test_two_that_send_more_to_each_other_than_may_wait(pair: tuple[Session, Session]) -> None:
    for one, other in (pair, pair[::-1]):
        one.upload(1, LARGE)
        assert one.failures(other.as_peer()) == []
    for one, other in (pair, pair[::-1]):
        # Both are told to receive before an answer of either is waited for: it sends all, and then waits as well.
        one.submit(*(Send(1, 1, transfer) for transfer in range(4)),
                   *(Receive(2, transfer, other.name) for transfer in range(4)))
    for one in pair:
        result, [got] = one.ask(fetch=(2,))
        assert result.failures == ()
        assert torch.equal(got, LARGE)


def test_a_failure_is_told_by_both_with_one_origin(pair: tuple[Session, Session]) -> None:
    here, there = pair
    [sent] = here.ask(there.as_peer(), Send(99, 1, 1))[0].failures
    result, _ = there.ask(Receive(5, 1, here.name), fetch=(5,))
    [received] = result.failures
    assert (sent.source, sent.identity) == ("", received.source_identity)
    assert received.source == here.name
    assert (received.kind, received.message) == (sent.kind, sent.message)


def test_a_server_that_is_killed_while_another_waits_for_it(
    server: Any, start_server: Any, open_session: OpenSession
) -> None:
    mortal = start_server()
    here, there = open_session(mortal), open_session(server)
    assert here.failures(there.as_peer()) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(there.ask, Receive(5, 1, here.name), fetch=(5,))
        time.sleep(SHORT_S)
        assert not waiting.done()
        mortal.kill()
        result, _ = waiting.result(SOON_S)
    [failure] = result.failures
    assert failure.kind == "PeerError"
    assert here.name in failure.message
    assert result.items == (Poisoned(failure.identity),)
    there.lives()


def test_a_server_that_is_killed_before_it_is_sent_to(
    server: Any, start_server: Any, open_session: OpenSession
) -> None:
    mortal = start_server()
    here, there = open_session(server), open_session(mortal)
    here.upload(1, LARGE)
    assert here.failures(there.as_peer()) == []
    mortal.kill()
    mortal.process.wait()
    [(kind, message)] = here.failures(Send(1, 1, 1))
    assert kind == "PeerError"
    assert mortal.address in message
    [(kind, message)] = here.failures(Send(1, 1, 2))
    assert "not connected" in message
    [(kind, message)] = here.failures(there.as_peer())
    assert kind == "PeerError"
    assert mortal.address in message
    here.lives()


def test_a_session_that_is_over_and_one_that_never_was(pair: tuple[Session, Session]) -> None:
    here, there = pair
    [(kind, message)] = here.failures(Peer(1, there.address, bytes(16)))
    assert kind == "PeerError"
    assert there.address in message
    there.connection.close()
    deadline = time.monotonic() + SOON_S
    # Another number each time: what was reached before the session was over is not looked for again.
    for number in itertools.count(2):
        if (failed := here.failures(there.as_peer(number))) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert failed[0][1] == message
    here.lives()


def sessions_of(server: Any) -> int:
    connection = connect(server.address, ConnectOptions())
    connection.close()
    return connection.welcome.sessions


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_client_that_leaves_while_its_session_waits(start_server: Any, open_session: OpenSession) -> None:
    server = start_server()
    first, second, third = open_session(server), open_session(server), open_session(server)
    assert (first.welcome.sessions, third.welcome.sessions) == (0, 2)
    assert second.failures(first.as_peer()) == []
    # Waits for one that lives and sends nothing, and for one that never comes; more of the client's is on its way.
    first.submit(Receive(5, 1, second.name))
    first.submit(Receive(5, 1, "nobody"), Seed(1))
    third.submit(Receive(5, 1, "nobody"))
    time.sleep(SHORT_S)
    first.connection.close()
    third.connection.close()
    assert soon(lambda: sessions_of(server) == 1)
    second.lives()


def test_a_client_that_leaves_while_its_session_is_held_up(
    server: Any, start_server: Any, open_session: OpenSession
) -> None:
    sender = start_server()
    here, there = open_session(sender), open_session(server)
    here.upload(1, LARGE)
    assert here.failures(there.as_peer()) == []
    here.submit(*(Send(1, 1, transfer) for transfer in range(8)))
    time.sleep(1.0)
    assert sessions_of(sender) == 1
    here.connection.close()
    assert soon(lambda: sessions_of(sender) == 0)
    there.lives()


@pytest.mark.parametrize("busy", ["receiving", "sending"])
def test_a_server_is_stopped_while_a_session_waits(
    server: Any, start_server: Any, open_session: OpenSession, busy: str
) -> None:
    stopped = start_server()
    here, there = open_session(stopped), open_session(server)
    here.upload(1, LARGE)
    assert here.failures(there.as_peer()) == []
    commands = [Receive(5, 1, "nobody")] if busy == "receiving" else [Send(1, 1, transfer) for transfer in range(8)]
    here.submit(*commands)
    time.sleep(1.0)
    began = time.monotonic()
    assert stopped.stop() == 0
    assert time.monotonic() - began < 5
    assert "still running" not in stopped.log.read_text()
    there.lives()


def frame(message: Any, body: bytes = b"") -> bytes:
    header = messages.encode(message)
    return encode_head(1, len(header), len(body)) + header + body


def greeting(session: Session, sender: str = "peer") -> bytes:
    return frame(PeerHello(PROTOCOL_VERSION, sys.byteorder, session.welcome.mailbox, sender))


def transfer_of(number: int, value: Any = 1) -> bytes:
    return frame(ValueTransfer(number, Plain(value)))


SPAN = TensorHeader("uint8", (64,), (1,))
BAD = {
    "batch": (frame(Batch(synchronize=True)), "DJ303"),
    "peer-again": (frame(PeerHello(PROTOCOL_VERSION, sys.byteorder, bytes(16), "")), "DJ303"),
    "transfer-twice": (transfer_of(1) + transfer_of(1, 2), "DJ303"),
    "nothing": (frame(ValueTransfer(1)), "DJ303"),
    "layout-beyond-its-bytes": (frame(ValueTransfer(1, SPAN, Layout((2, 2), (64, 1))), bytes(64)), "DJ303"),
    "layout-of-all-memory": (
        frame(ValueTransfer(1, SPAN, Layout((64,), (2**40,), is_packed=True)), bytes(64)), "DJ303"),
    "body-too-long": (frame(ValueTransfer(1, SPAN), bytes(128)), "DJ303"),
    "header-lies": (encode_head(1, 10, 2**33), "closed"),
    "cut-short": (frame(ValueTransfer(1, SPAN), bytes(64))[:-1], "closed"),
    "random": (bytes(range(1, 200)), "DJ303"),
}


@pytest.mark.parametrize(("data", "outcome"), list(BAD.values()), ids=list(BAD))
def test_a_peer_that_misbehaves_is_refused_and_its_session_told(
    pair: tuple[Session, Session], server: Any, raw_client: Any, data: bytes, outcome: str
) -> None:
    here, _ = pair
    with raw_client(server.port, greets=False) as peer:
        peer.send(greeting(here))
        assert peer.outcome() == "Welcome"
        peer.send(data)
        peer.end()
        assert peer.outcome() == outcome
        assert peer.outcome() == "closed"
    result, _ = here.ask(Receive(5, 1, "peer"), Receive(6, 9, "peer"), fetch=(5, 6))
    first, last = result.items
    assert isinstance(last, Poisoned)
    # What came before the bad frame was good.
    assert first == Plain(1) if data.startswith(transfer_of(1)) else isinstance(first, Poisoned)
    assert {failure.kind for failure in result.failures} == {"PeerError"}
    here.lives()


def test_the_answer_to_a_peer_tells_nothing_of_the_session(
    pair: tuple[Session, Session], server: Any, raw_client: Any
) -> None:
    here, _ = pair
    with raw_client(server.port, greets=False) as peer:
        peer.send(greeting(here))
        answer = peer._frames.read()[1]
    assert isinstance(answer, Welcome)
    assert (answer.session, answer.mailbox, answer.held_bytes) == ("", b"", 0)


def test_a_peer_needs_no_token_and_its_mailbox_cannot_be_guessed(
    start_server: Any, open_session: OpenSession, raw_client: Any
) -> None:
    guarded = start_server(DJINN_TOKEN="correct horse")
    here = open_session(guarded, "correct horse")
    with raw_client(guarded.port, greets=False) as peer:
        peer.send(greeting(here) + transfer_of(1))
        assert peer.outcome() == "Welcome"
        result, _ = here.ask(Receive(5, 1, "peer"), fetch=(5,))
        assert result.items == (Plain(1),)
    wrong = bytes([*here.welcome.mailbox[:15], here.welcome.mailbox[15] ^ 1])
    with raw_client(guarded.port, greets=False) as peer:
        peer.send(frame(PeerHello(PROTOCOL_VERSION, sys.byteorder, wrong, "peer")))
        assert peer.outcome() == "DJ305"
    with pytest.raises(RefusedError):
        connect(guarded.address, ConnectOptions())
    assert here.welcome.mailbox.hex() not in guarded.log.read_text()


def test_peers_end_with_their_session(server: Any, open_session: OpenSession, raw_client: Any) -> None:
    here = open_session(server)
    with raw_client(server.port, greets=False) as peer:
        peer.send(greeting(here))
        assert peer.outcome() == "Welcome"
        here.connection.close()
        assert peer.outcome() in {"closed", "DJ309"}
        peer.send(transfer_of(1))
        assert peer.outcome() == "closed"


def test_a_server_that_others_can_reach_connects_to_named_ones_only(
    server: Any, start_server: Any, open_session: OpenSession, certificates: Any
) -> None:
    to = open_session(server)
    for arguments, reaches in (((), False), (("--peers", "example.org,10.0.0.0/8"), False),
                               (("--peers", "127.0.0.0/8"), True)):
        public = start_server("--host", "0.0.0.0", "--tls-cert", certificates.server, *arguments, DJINN_TOKEN="secret")
        address = f"tls://127.0.0.1:{public.port}"
        here = Session(address, connect_tls(address, connect_options(token="secret", tls_ca=certificates.authority)))
        failed = here.failures(to.as_peer())
        here.connection.close()
        assert bool(failed) is not reaches
        assert all(kind == "PeerError" and "--peers 127.0.0.1" in message for kind, message in failed)


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no Unix-domain sockets")
def test_servers_on_paths(start_server: Any, open_session: OpenSession, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("s")
    here, there = (open_session(start_server("--unix", str(folder / name))) for name in ("a", "b"))
    here.upload(1, LARGE)
    assert here.failures(there.as_peer(), Send(1, 1, 1)) == []
    _, [got] = there.ask(Receive(5, 1, here.name), fetch=(5,))
    assert torch.equal(got, LARGE)


def test_a_welcome_tells_what_a_server_may_hold_and_does(start_server: Any, open_session: OpenSession) -> None:
    limited = start_server("--memory-mib", "512")
    first = open_session(limited)
    assert (first.welcome.memory_bytes, first.welcome.held_bytes, first.welcome.sessions) == (512 * 2**20, 0, 0)
    first.upload(1, LARGE)
    second = open_session(limited)
    assert (second.welcome.held_bytes, second.welcome.sessions) == (LARGE.nbytes, 1)
    first.connection.close()
    assert soon(lambda: sessions_of(limited) == 1)
    assert open_session(limited).welcome.held_bytes == 0


def test_timings_get_through_a_connection_that_knows_contents(server: Any) -> None:
    connection = TcpTransport().connect(server.address, connect_options(owner="somebody"))
    result, _ = connection.request(Batch([Upload(1, header_of(ONES))], synchronize=True, timed=True), [ONES])
    assert [timing.kind for timing in result.timings] == ["upload"]
    assert result.now_ns >= result.timings[0].end_ns
    connection.close()
