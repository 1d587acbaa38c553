"""The proxy of the benchmarks delays each direction, and only that."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from support.network import delaying_proxy

DELAY_S = 0.02
LENGTH = 32 << 20


def echo(listener: socket.socket) -> None:
    """Answer each byte, a zero after all that it announces."""
    connection, _ = listener.accept()
    with connection:
        while (asked := connection.recv(1)):
            left = LENGTH if asked == b"\0" else 0
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            connection.sendall(asked)


@pytest.fixture
def client() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=echo, args=(listener,))
        server.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen([sys.executable, "-m", delaying_proxy.__name__, address, str(DELAY_S)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            yield connection
        server.join(10)
        assert not server.is_alive(), "the end of a connection travels too"
        process.communicate(timeout=10)
        assert process.returncode == 0


def seconds_of(client: socket.socket, message: bytes) -> float:
    begin = time.perf_counter()
    client.sendall(message)
    assert client.recv(1) == message[:1]
    return time.perf_counter() - begin


def test_each_way_is_delayed(client: socket.socket) -> None:
    taken = [seconds_of(client, b"x") for _ in range(9)]
    assert min(taken) >= 2 * DELAY_S
    assert statistics.median(taken) < 3 * DELAY_S


def test_much_travels_in_the_time_of_one_delay(client: socket.socket) -> None:
    # In pieces of 1 MB, each of which waited for the one before, it would take 32 delays.
    assert min(seconds_of(client, bytes(1 + LENGTH)) for _ in range(5)) < 16 * DELAY_S
