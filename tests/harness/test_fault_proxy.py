"""The proxy of the tests does to a connection what it says, and only that."""

from __future__ import annotations

import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.network.fault_proxy import (
    Bandwidth,
    BitFlip,
    Chunk,
    FaultProxy,
    Latency,
    LimitData,
    ResetPeer,
    Slicer,
    SlowClose,
    Timeout,
)

DATA = random.Random(1).randbytes(200_000)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can drop what comes for a socket")
Open = Callable[..., tuple[socket.socket, socket.socket, FaultProxy]]


@pytest.fixture
def through() -> Iterator[Open]:
    """Connects two sockets through a proxy: the client's, the server's, and the proxy."""
    ended: list[Any] = []

    def start(**options: Any) -> tuple[socket.socket, socket.socket, FaultProxy]:
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = FaultProxy(listener.getsockname()[1], **options)
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=20)
        server, _ = listener.accept()
        server.settimeout(20)
        ended.extend((client, server, proxy, listener))
        return client, server, proxy

    yield start
    for one in ended:
        one.close()


def everything(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(2**16):
        data += part
    return data


def send_and_end(sock: socket.socket, data: bytes) -> None:
    def send() -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    threading.Thread(target=send).start()


def test_without_faults_it_changes_nothing_and_keeps_what_passed(through: Open) -> None:
    client, server, proxy = through(records=True)
    send_and_end(client, DATA)
    assert everything(server) == DATA
    send_and_end(server, DATA[::-1])
    assert everything(client) == DATA[::-1]
    (link,) = proxy.links
    assert (bytes(link.sent), bytes(link.answered)) == (DATA, DATA[::-1])
    for thread in link.threads:
        thread.join(5)
    assert not link.is_alive


def test_latency_delays_one_direction_only_and_holds_nothing_up(through: Open) -> None:
    client, server, _ = through(upstream=[Latency(1.0)])
    began = time.monotonic()
    send_and_end(client, DATA)
    server.sendall(b"x")
    assert client.recv(1) == b"x"
    assert select.select([server], [], [], 0) == ([], [], []), "the other direction is not delayed"
    assert server.recv(1) == DATA[:1]
    assert time.monotonic() - began >= 1.0
    first = time.monotonic()
    assert everything(server) == DATA[1:]
    assert time.monotonic() - first < 1.0, "the rest waits for no latency of its own"


def test_bandwidth_takes_its_time(through: Open) -> None:
    client, server, _ = through(upstream=[Bandwidth(10_000)])
    began = time.monotonic()
    send_and_end(client, DATA[:5000])
    assert everything(server) == DATA[:5000]
    assert 0.4 < time.monotonic() - began < 1.5


@pytest.mark.parametrize(("slicer", "wanted"), [
    (Slicer(cuts=[1, 4, 9]), [1, 3, 2, 3, 1]),
    (Slicer(every_bytes=4), [4, 2, 2, 2]),
    (Slicer(), [6, 4]),
])
def test_a_slicer_cuts_where_it_is_told_whatever_chunks_come(slicer: Slicer, wanted: list[int]) -> None:
    chunks = [Chunk(b"012345", 0.0), Chunk(b"6789", 0.0)]
    pieces = list(slicer.apply(iter(chunks)))
    assert b"".join(piece.data for piece in pieces) == b"0123456789"
    assert [len(piece.data) for piece in pieces] == wanted


def test_slices_arrive_apart(through: Open) -> None:
    client, server, _ = through(upstream=[Slicer(cuts=[3], pause_s=0.2)])
    client.sendall(b"abcdef")
    assert [server.recv(100), server.recv(100)] == [b"abc", b"def"]


def test_bits_flip_where_they_are_told_and_nowhere_else(through: Open) -> None:
    client, server, _ = through(upstream=[Slicer(every_bytes=1000), BitFlip([0, 8 * 1000 + 7, 8 * 150_000 + 3])])
    send_and_end(client, DATA)
    got = everything(server)
    differ = {index: got[index] ^ DATA[index] for index in range(len(DATA)) if got[index] != DATA[index]}
    assert differ == {0: 1, 1000: 128, 150_000: 8}
    assert len(got) == len(DATA)


def test_a_reset_is_a_reset_for_both(through: Open) -> None:
    client, server, _ = through(upstream=[ResetPeer(10)])
    client.sendall(bytes(20))
    for end in (client, server):
        with pytest.raises(ConnectionResetError):
            everything(end)


def test_a_reset_may_come_at_any_time(through: Open) -> None:
    client, server, proxy = through()
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    threading.Timer(0.1, proxy.reset).start()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_a_limit_of_data_is_an_end(through: Open) -> None:
    client, server, _ = through(downstream=[LimitData(100)])
    server.sendall(DATA[:5000])
    assert everything(client) == DATA[:100]


def test_a_timeout_swallows_the_rest_and_says_nothing(through: Open) -> None:
    client, server, _ = through(upstream=[Timeout(100)])
    client.sendall(DATA[:5000])
    assert server.recv(5000) == DATA[:100]
    server.settimeout(0.3)
    with pytest.raises(TimeoutError):
        server.recv(1)
    server.sendall(b"still there")
    assert client.recv(20) == b"still there"


def test_a_slow_close_comes_late(through: Open) -> None:
    client, server, _ = through(upstream=[SlowClose(0.3)])
    client.sendall(b"x")
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b"x"
    began = time.monotonic()
    assert server.recv(1) == b""
    assert 0.25 < time.monotonic() - began < 1


@linux
def test_what_vanished_is_not_even_acknowledged_and_comes_when_the_network_does(through: Open) -> None:
    client, server, proxy = through()
    client.sendall(b"a")
    assert server.recv(1) == b"a"
    proxy.vanish()
    client.sendall(b"b")
    server.settimeout(0.4)
    with pytest.raises(TimeoutError):
        server.recv(1)
    assert unacknowledged(client) > 0
    proxy.heal()
    server.settimeout(10)
    assert server.recv(1) == b"b"
    assert unacknowledged(client) == 0


def unacknowledged(sock: socket.socket) -> int:
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)[24:28], sys.byteorder)
