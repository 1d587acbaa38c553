"""The client's end of a TCP session: greeting, refusals, answers."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import pytest
import torch
from support.servers.tcp import SYNCHRONIZE, WELCOME, answer, expect_closed, raw_socket, tcp_only

from djinn.errors import (
    ConfigurationError,
    ProtocolVersionError,
    RefusedError,
    RemoteTimeoutError,
    TransportError,
)
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import (
    PROTOCOL_VERSION,
    Batch,
    Failure,
    Hello,
    Plain,
    Refusal,
    Result,
    Upload,
    Welcome,
)
from djinn.wire.tensors import header_of
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.common.wire.frames import HEAD, MAGIC
from djinn_plugins.transport.tcp.client import connect
from djinn_plugins.transport.tcp.listener import SocketChannel, listen


def test_a_session(serve: Any, open_connection: Any) -> None:
    seen: list[Any] = []
    tensor = torch.arange(100_000.0)

    def script(channel: SocketChannel) -> None:
        received = channel.receive()
        seen.append(received[1])
        channel.send(received[0], WELCOME)
        channel.greeted()
        seen.extend(channel.receive() for _ in range(2))
        sequence, _, tensors = seen[-1]
        channel.send(sequence, Result((header_of(tensors[0]), Plain(7))), tensors)
        seen.append(channel.receive())

    connection = open_connection(serve(script, greets=False), token="secret", owner="")
    assert connection.welcome == WELCOME
    sent = connection.bytes_sent
    connection.submit(Batch(fetch=()), ())
    result, data = connection.request(Batch([Upload(1, header_of(tensor))], fetch=(1, 2)), [tensor])
    assert result == Result((header_of(tensor), Plain(7)))
    assert torch.equal(data[0], tensor)
    assert min(connection.bytes_sent - sent, connection.bytes_received) > tensor.nbytes
    connection.close()
    connection.close()
    expect_closed(connection)
    while len(seen) < 4:
        time.sleep(0.01)
    assert seen[0] == Hello(PROTOCOL_VERSION, str(torch.__version__), sys.version.split()[0], sys.byteorder, "secret",
                            resumes=True, takes_early=True)
    assert [received[0] for received in seen[1:3]] == [2, 3]
    assert seen[3] is None


def test_a_request_is_always_answered_and_a_submit_never_waited_for(serve: Any, open_connection: Any) -> None:
    seen: list[Any] = []

    def script(channel: SocketChannel) -> None:
        seen.append(answer(channel)[1])
        seen.append(answer(channel, Result((Plain(1),), (Failure(1, "ValueError", "first"),)))[1])
        seen.append(answer(channel, Result((Plain(2),)))[1])

    connection = open_connection(serve(script))
    assert connection.request(Batch(), ()) == (Result(), [])
    connection.submit(Batch(fetch=(1,)), ())
    expected = Result((Plain(2),), (Failure(1, "ValueError", "first"),))
    assert connection.request(Batch(fetch=(2,)), ()) == (expected, [])
    while len(seen) < 3:
        time.sleep(0.01)
    assert seen == [SYNCHRONIZE, Batch(fetch=(1,)), Batch(fetch=(2,))]


@tcp_only
def test_both_ends_send_at_once_and_notice_a_vanished_peer(serve: Any, open_connection: Any) -> None:
    ends: list[Any] = []
    done = threading.Event()

    def script(channel: SocketChannel) -> None:
        ends.append(raw_socket(channel))
        done.wait(10)

    connection = open_connection(serve(script))
    while not ends:
        time.sleep(0.01)
    ends.append(raw_socket(connection))
    for sock in ends:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if sys.platform == "linux":
        for sock in ends:
            assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in
                    (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)] == [5, 5, 2]
        # Linux would go by it instead of the count, and give up on a side that merely computes for long.
        assert [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in ends] == [0, 0]
    done.set()


def test_nobody_answers(open_connection: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(TransportError, match=f"Nobody answers at tcp://127.0.0.1:{port}: ") as caught:
        open_connection(f"tcp://127.0.0.1:{port}")
    assert "djinn serve" in caught.value.hint
    with pytest.raises(ConfigurationError):
        open_connection(f"tcp://{'a' * 70}:{port}")


def test_a_host_that_answers_and_says_nothing_takes_as_long_as_is_allowed(open_connection: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(RemoteTimeoutError, match=address):
            open_connection(address, connect_timeout_s=0.4)
        assert 0.3 < time.monotonic() - began < 3


@pytest.mark.parametrize("banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_something_else_answers(open_connection: Any, banner: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"

        def reply() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(banner)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(TransportError, match=address):
            open_connection(address)
        thread.join(10)


@pytest.mark.parametrize(("refusal", "kind"), [
    (Refusal("DJ305", "The token is wrong.", "Set DJINN_TOKEN."), RefusedError),
    (Refusal("DJ304", "The client speaks protocol 1, this server 9.", "Install the same."), ProtocolVersionError),
    (Refusal("DJ303", "A header of 5000 bytes.", ""), RefusedError),
])
def test_a_refusal_is_told_in_the_servers_words(
    serve: Any, open_connection: Any, refusal: Refusal, kind: type[Exception],
) -> None:
    def script(channel: SocketChannel) -> None:
        channel.receive()
        channel.send(1, refusal)

    address = serve(script, greets=False)
    with pytest.raises(kind) as caught:
        open_connection(address)
    assert type(caught.value) is kind
    for part in (address, refusal.summary, refusal.hint):
        assert part in str(caught.value)


@pytest.mark.parametrize("reply", [
    Welcome(PROTOCOL_VERSION + 1, "", "", sys.byteorder, "", ""),
    Welcome(PROTOCOL_VERSION, "", "", "big" if sys.byteorder == "little" else "little", "", ""),
])
def test_a_welcome_that_does_not_fit_is_declined(serve: Any, open_connection: Any, reply: Welcome) -> None:
    def script(channel: SocketChannel) -> None:
        channel.receive()
        channel.send(1, reply)

    address = serve(script, greets=False)
    with pytest.raises(ProtocolVersionError, match=address):
        open_connection(address)


def test_a_server_of_another_version_is_named(open_connection: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def reply() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(HEAD.pack(MAGIC, PROTOCOL_VERSION + 1, 0, 1, 0, 0, 0))

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ProtocolVersionError, match=f"protocol {PROTOCOL_VERSION + 1}"):
            open_connection(f"tcp://127.0.0.1:{listening.getsockname()[1]}")
        thread.join(10)


def test_ipv6() -> None:
    try:
        listener = listen("tcp://[::1]:0", ListenOptions())
    except TransportError:
        pytest.skip("this machine has no IPv6")
    assert listener.address.startswith("tcp://[::1]:")
    peers: list[str] = []

    def refuse() -> None:
        channel = listener.accept()
        assert channel is not None
        peers.append(channel.peer)
        channel.receive()
        channel.send(1, Refusal("DJ305", "over IPv6"))
        channel.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(RefusedError, match="over IPv6"):
        connect(listener.address, ConnectOptions())
    thread.join(10)
    assert peers[0].startswith("tcp://[::1]:")
    listener.close()


def test_a_port_that_is_taken() -> None:
    listener = listen("tcp://127.0.0.1:0", ListenOptions())
    with pytest.raises(TransportError, match=f"Cannot listen on {listener.address}"):
        listen(listener.address, ListenOptions())
    listener.close()
    with pytest.raises(ConfigurationError):
        listen("tcp://127.0.0.1", ListenOptions())
