"""A connection that does not keep up: recording goes on up to a limit, then waits; nothing is lost or out of order."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.tcp import SYNCHRONIZE, answer, expect_closed, raw_socket

from djinn.errors import RemoteTimeoutError, TransportError
from djinn.wire.messages import Batch, Plain, Result, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.transport.tcp import outbox
from djinn_plugins.transport.tcp.listener import SocketChannel

MIB = 2**20


def upload(number: int, length: int = MIB) -> tuple[Batch, list[torch.Tensor]]:
    tensor = torch.full((length,), number % 251, dtype=torch.uint8)
    return Batch([Upload(number, header_of(tensor))]), [tensor]


class Reader:
    """A server that reads when it is told to, and keeps what it got."""

    def __init__(self, uploads: int) -> None:
        self.reads = threading.Event()
        self.got: list[tuple[int, int, bool]] = []
        self._uploads = uploads

    def __call__(self, channel: SocketChannel) -> None:
        self.reads.wait(60)
        for _ in range(self._uploads):
            received = channel.receive()
            assert received is not None
            _, batch, (tensor,) = received
            number = batch.commands[0].handle
            self.got.append((number, tensor.numel(), bool((tensor == number % 251).all())))
        answer(channel, Result((Plain(1),)))


def submit_many(connection: Any) -> None:
    for number in range(2, 100):
        connection.submit(*upload(number))


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_sends_go_on_up_to_the_limit_then_wait_and_go_on_when_the_server_reads(
    serve: Any, open_connection: Any,
) -> None:
    count = 3 * outbox.MAX_QUEUED_BYTES // MIB
    server = Reader(count)
    connection = open_connection(serve(server))
    submitted: list[int] = []

    def record() -> None:
        for number in range(1, count + 1):
            batch, tensors = upload(number)
            connection.submit(batch, tensors)
            tensors[0].fill_(255)  # the caller's again
            submitted.append(number)

    recording = in_thread(record)
    reached, still = 0, 0
    while still < 10:
        time.sleep(0.1)
        reached, still = len(submitted), still + 1 if len(submitted) == reached else 0
    assert recording.is_alive()
    # Beside the outbox, the system's own buffers have room for some.
    assert outbox.MAX_QUEUED_BYTES - 2 * MIB <= len(submitted) * MIB <= outbox.MAX_QUEUED_BYTES + 48 * MIB
    assert connection._outbox.queued_bytes <= outbox.MAX_QUEUED_BYTES
    server.reads.set()
    recording.join(60)
    assert connection.request(SYNCHRONIZE, ()) == (Result((Plain(1),)), [])
    assert server.got == [(number, MIB, True) for number in range(1, count + 1)]
    # The answer may come before the thread that sends has counted what it sent.
    connection._outbox.drain(10)
    assert connection._outbox.queued_bytes == 0


def test_one_that_keeps_up_has_nothing_waiting_and_no_thread(serve: Any, open_connection: Any) -> None:
    server = Reader(200)
    server.reads.set()
    connection = open_connection(serve(server))
    for number in range(1, 201):
        connection.submit(*upload(number, 1000))
        assert connection._outbox.queued_bytes == 0
    connection.request(SYNCHRONIZE, ())
    assert not [thread for thread in threading.enumerate() if thread.name == "djinn-outbox"]


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process can be read on Linux")
def test_memory_is_bounded_while_nobody_reads(serve: Any, open_connection: Any) -> None:
    server = Reader(200)
    connection = open_connection(serve(server))
    batch, tensors = upload(7)
    before = resident_bytes()
    recording = in_thread(lambda: [connection.submit(batch, tensors) for _ in range(200)])
    recording.join(3)
    assert recording.is_alive()
    assert resident_bytes() - before < outbox.MAX_QUEUED_BYTES + 32 * MIB
    server.reads.set()
    recording.join(60)
    connection.request(SYNCHRONIZE, ())


def test_what_is_larger_than_the_limit_is_sent_without_a_copy(serve: Any, open_connection: Any) -> None:
    server = Reader(3)
    connection = open_connection(serve(server))
    large = outbox.MAX_QUEUED_BYTES + 1
    sizes = [8 * MIB, large, 1]
    seen: list[int] = []

    def record() -> None:
        for number, length in enumerate(sizes, start=1):
            connection.submit(*upload(number, length))
            seen.append(connection._outbox.queued_bytes)

    recording = in_thread(record)
    recording.join(1)
    assert len(seen) == 1
    assert 0 < seen[0] <= 8 * MIB + 200
    server.reads.set()
    recording.join(60)
    connection.request(SYNCHRONIZE, ())
    assert server.got == [(number, length, True) for number, length in enumerate(sizes, start=1)]
    assert max(seen) <= 8 * MIB + 200


@pytest.mark.parametrize("waits", ["for room", "for an answer"])
def test_a_server_that_dies_while_something_waits_is_told(serve: Any, open_connection: Any, waits: str) -> None:
    dies = threading.Event()

    def script(channel: SocketChannel) -> None:
        dies.wait(30)
        raw_socket(channel).close()

    connection = open_connection(serve(script))
    connection.submit(*upload(1, 16 * MIB))
    threading.Timer(0.5, dies.set).start()
    began = time.monotonic()
    with pytest.raises(TransportError, match=connection.address):
        submit_many(connection) if waits == "for room" else connection.request(SYNCHRONIZE, ())
    assert time.monotonic() - began < 5
    expect_closed(connection)


def test_a_server_that_never_reads_again_is_given_up_if_the_client_says_so(serve: Any, open_connection: Any) -> None:
    told = threading.Event()
    connection = open_connection(serve(lambda channel: told.wait(30)), request_timeout_s=0.5)
    with pytest.raises(RemoteTimeoutError, match=r"nothing moved for 0\.5 s"):
        submit_many(connection)
    told.set()
    expect_closed(connection)


def test_closing_wakes_a_thread_that_waits_for_room(serve: Any, open_connection: Any) -> None:
    told = threading.Event()
    connection = open_connection(serve(lambda channel: told.wait(30)))
    raised: list[BaseException] = []

    def record() -> None:
        try:
            submit_many(connection)
        except TransportError as error:
            raised.append(error)

    recording = in_thread(record)
    recording.join(1)
    assert recording.is_alive()
    connection.close()
    recording.join(10)
    assert connection.address in str(raised[0])
    told.set()
