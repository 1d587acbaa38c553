"""What a server lets itself be told: lies are found out early, slowness has limits."""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.tcp import frame

from djinn.errors import ProtocolError, RemoteTimeoutError, TransportError
from djinn.wire import messages
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Hello, Result, TensorHeader, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.wire.frames import HEAD, MAGIC, MAX_HEADER_BYTES, encode_head

HELLO = Hello(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder)


@pytest.mark.parametrize(("head", "expected"), [
    (encode_head(1, 256 * 2**20, 0), "A header of 268435456 bytes"),
    (encode_head(1, 10, 2**62), "A body of"),
    (encode_head(1, 10, 16 * 2**30 + 1), "A body of"),
    (HEAD.pack(b"GET ", PROTOCOL_VERSION, 0, 1, 10, 0, 0), "not a djinn frame"),
    (HEAD.pack(MAGIC, PROTOCOL_VERSION, 1, 1, 10, 0, 0), "Reserved bits"),
    (HEAD.pack(MAGIC, PROTOCOL_VERSION, 0, 1, 10, 9, 0), "Reserved bits"),
    (HEAD.pack(MAGIC, PROTOCOL_VERSION + 1, 0, 1, 10, 0, 0), f"speaks protocol {PROTOCOL_VERSION + 1}"),
])
def test_a_head_that_lies_is_refused_before_anything_else_is_read(
    connect_raw: Callable[..., Any], head: bytes, expected: str,
) -> None:
    pair = connect_raw()
    pair.client.sendall(head)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=expected):
            pair.channel.receive()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [
    encode_head(1, 4097, 0),
    encode_head(1, 100, 64),
    frame(Batch([Upload(1, header_of(torch.ones(3)))]), torch.ones(3)),
])
def test_before_the_greeting_a_frame_is_small_and_has_no_body(connect_raw: Callable[..., Any], data: bytes) -> None:
    pair = connect_raw(greeted=False)
    pair.client.sendall(data)
    with pytest.raises(ProtocolError, match="is the limit"):
        pair.channel.receive()
    later = connect_raw()
    later.client.sendall(data)
    later.client.shutdown(socket.SHUT_WR)
    if len(data) > HEAD.size:
        assert later.channel.receive() is not None
    else:
        with pytest.raises(TransportError, match="in the middle of a frame"):
            later.channel.receive()


def test_a_header_that_never_comes_takes_no_memory(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw()
    pair.client.sendall(encode_head(1, MAX_HEADER_BYTES, 0) + b"\x80" * 1000)
    pair.client.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    try:
        with pytest.raises(TransportError):
            pair.channel.receive()
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process can be limited and read on Linux")
def test_bodies_that_never_come_take_no_memory(connect_raw: Callable[..., Any]) -> None:
    described = TensorHeader("uint8", (64 * 2**10 - 8,), (1,))
    message = Batch([Upload(number, described) for number in range(100_000)])
    header = messages.encode(message)
    pair = connect_raw()
    writer = threading.Thread(target=pair.client.sendall,
                              args=(encode_head(1, len(header), 100_000 * 64 * 2**10) + header + b"x" * 1000,))
    writer.start()
    before = resident_bytes()

    def expect_broken() -> None:
        with pytest.raises(TransportError):
            pair.channel.receive()

    reader = threading.Thread(target=expect_broken)
    reader.start()
    writer.join(20)
    time.sleep(0.5)
    grown = resident_bytes() - before
    pair.client.shutdown(socket.SHUT_WR)
    reader.join(20)
    # The header itself takes some 60 MB as objects; what it announces is 6.5 GB, and would be 400 MB in touched pages.
    assert not writer.is_alive(), "the header has been read"
    assert grown < 200 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process can be limited on Linux")
def test_a_body_that_cannot_be_allocated_is_a_protocol_error(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw()
    header = messages.encode(Batch([Upload(1, TensorHeader("uint8", (2**33,), (1,)))]))
    pair.client.sendall(encode_head(1, len(header), 2**33) + header)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, hard))
    try:
        with pytest.raises(ProtocolError, match="8589934592 bytes cannot be allocated"):
            pair.channel.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("drip_s", [None, 0.05])
def test_a_greeting_takes_its_time_at_most_however_it_drips(
    connect_raw: Callable[..., Any], drip_s: float | None,
) -> None:
    pair = connect_raw(greeted=False, greeting_timeout_s=0.4, progress_timeout_s=10.0)
    ended = threading.Event()

    def drip() -> None:
        for byte in frame(HELLO):
            if ended.wait(drip_s):
                return
            pair.client.sendall(bytes([byte]))

    if drip_s is not None:
        threading.Thread(target=drip).start()
    began = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match="took too long"):
        pair.channel.receive()
    ended.set()
    assert 0.3 < time.monotonic() - began < 3


def test_a_frame_that_has_begun_must_not_stand_still(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw(progress_timeout_s=0.3)
    pair.client.sendall(frame(Batch([Upload(1, header_of(torch.ones(3)))]), torch.ones(3))[:50])
    began = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match=r"nothing moved for 0\.3 s"):
        pair.channel.receive()
    assert time.monotonic() - began < 3


def test_a_frame_that_drips_is_no_better_than_one_that_stands_still(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw(progress_timeout_s=0.8)
    data = frame(Batch([Upload(1, header_of(torch.ones(3)))]), torch.ones(3))
    ended = threading.Event()

    def drip() -> None:
        for byte in data:
            if ended.wait(0.1):
                return
            pair.client.sendall(bytes([byte]))

    threading.Thread(target=drip).start()
    began = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match="less than 1024 bytes a second"):
        pair.channel.receive()
    ended.set()
    assert 0.5 < time.monotonic() - began < 3, "the whole of it takes more than ten seconds"


def test_a_large_frame_may_take_longer_than_one_may_stand_still(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw(progress_timeout_s=0.4)
    value = torch.arange(2**14)
    data = frame(Batch([Upload(1, header_of(value))]), value)

    def send() -> None:
        for begin in range(0, len(data), 2**13):
            pair.client.sendall(data[begin:begin + 2**13])
            time.sleep(0.1)

    threading.Thread(target=send).start()
    began = time.monotonic()
    received = pair.channel.receive()
    assert time.monotonic() - began > 0.8
    assert received is not None
    assert torch.equal(received[2][0], value)


def test_between_frames_a_client_may_be_quiet_for_as_long_as_it_likes(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw(progress_timeout_s=0.2, greeting_timeout_s=0.2)
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.append(pair.channel.receive()))
    reader.start()
    time.sleep(1.5)
    pair.client.sendall(frame(Batch(synchronize=True)))
    reader.join(10)
    assert received == [(1, Batch(synchronize=True), [])]


def test_a_client_that_does_not_take_its_answer_is_given_up(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw(progress_timeout_s=0.5)
    answer = torch.zeros(2**25)
    began = time.monotonic()
    with pytest.raises(TransportError):
        pair.channel.send(1, Result((header_of(answer),)), [answer])
    assert time.monotonic() - began < 10


def test_closing_a_listener_or_channel_from_another_thread_wakes_it(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw()
    results: list[Any] = []

    def wait_for_message() -> None:
        try:
            results.append(pair.channel.receive())
        except TransportError as error:
            results.append(error)

    threads = [threading.Thread(target=lambda: results.append(pair.listener.accept())),
               threading.Thread(target=wait_for_message)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for _ in range(2):
        pair.listener.close()
        pair.channel.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert results == [None, None]
    with pytest.raises(TransportError, match="it was closed"):
        pair.channel.receive()


def test_a_listener_whose_socket_is_gone_ends(
    connect_raw: Callable[..., Any], caplog: pytest.LogCaptureFixture,
) -> None:
    pair = connect_raw()
    pair.listener._socket.close()
    assert pair.listener.accept() is None
    assert f"{pair.listener.address} can no longer be listened on" in caplog.text
