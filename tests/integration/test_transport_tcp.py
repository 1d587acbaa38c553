"""Frames over real sockets: whole, sliced, cut short, lied about."""

from __future__ import annotations

import ctypes
import json
import resource
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from djinn_transport_tcp import sockets
from djinn_transport_tcp.address import parse_address
from djinn_transport_tcp.listener import TcpChannel, TcpListener, listen
from djinn_transport_tcp.sockets import ByteStream
from djinn_transport_tcp.stream import FrameStream

from djinn.errors import ProtocolError, RemoteTimeoutError, TransportError
from djinn.kinds.transport import ListenOptions
from djinn.protocol import messages
from djinn.protocol.frames import HEAD, MAGIC, MAX_HEADER_BYTES, encode_head
from djinn.protocol.messages import PROTOCOL_VERSION, Batch, Free, Hello, Result, TensorHeader, Upload
from djinn.protocol.tensors import DTYPES, header_of

CORPUS = Path(__file__).parents[2] / "specs" / "wire"
HELLO = Hello(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder)


@attrs.frozen
class Pair:
    """A raw client socket and the channel that serves it."""

    client: socket.socket
    channel: TcpChannel
    listener: TcpListener


@pytest.fixture
def connect() -> Iterator[Callable[..., Pair]]:
    """Connects a raw socket to a real listener, greeted unless told otherwise."""
    made: list[Pair] = []

    def pair(*, greeted: bool = True, **options: Any) -> Pair:
        listener = listen("tcp://127.0.0.1:0", ListenOptions(**options))
        client = socket.create_connection(parse_address(listener.address), timeout=10)
        channel = listener.accept()
        assert channel is not None
        if greeted:
            channel.greeted()
        made.append(Pair(client, channel, listener))
        return made[-1]

    yield pair
    for one in made:
        one.client.close()
        one.channel.close()
        one.listener.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        yield near, far


def frame(message: messages.Message, *tensors: torch.Tensor, sequence: int = 1) -> bytes:
    """The bytes of a frame, taken from what a real stream sends."""
    near, far = socket.socketpair()
    with near, far:
        stream = ByteStream(near)
        writer = threading.Thread(target=FrameStream(stream).write, args=(sequence, message, tensors))
        writer.start()
        data = far.recv(HEAD.size, socket.MSG_WAITALL)
        _, _, _, _, header_bytes, _, body_bytes = HEAD.unpack(data)
        while len(data) < HEAD.size + header_bytes + body_bytes:
            data += far.recv(2**20)
        writer.join(10)
        assert len(data) == stream.bytes_sent
        return data


def bits(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def samples() -> list[torch.Tensor]:
    raw = torch.arange(2 * 3 * 5 * 16, dtype=torch.int32).to(torch.uint8)
    made = [raw.clone()[: 30 * dtype.itemsize].view(dtype).reshape(2, 3, 5) for dtype in DTYPES.values()
            if dtype != torch.bool]
    made += [torch.tensor([True, False, True]), torch.tensor(1.5), torch.empty(0), torch.empty(3, 0, 2),
             torch.randn(4, 5).t(), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
             torch.randn(1, 7, 1).expand(1, 7, 1), torch.tensor([float("nan"), -0.0, float("inf")])]
    return made


@pytest.mark.parametrize("gathers", [True, False])
def test_tensors_of_every_dtype_and_dense_stride_arrive_bit_for_bit(
    ends: tuple[socket.socket, socket.socket], gathers: bool,
) -> None:
    sent = samples() * 150  # more pieces than one system call takes
    near, far = (FrameStream(ByteStream(end, gathers=gathers)) for end in ends)
    items = tuple(header_of(tensor) for tensor in sent)
    writer = threading.Thread(target=near.write, args=(7, Result(items), sent))
    writer.start()
    received = far.read()
    writer.join(10)
    assert received is not None
    sequence, message, tensors = received
    assert (sequence, message) == (7, Result(items))
    assert len(tensors) == len(sent) > 2 * sockets.MAX_CALL_VIEWS
    for before, after in zip(sent, tensors, strict=True):
        assert (after.dtype, after.size(), after.stride()) == (before.dtype, before.size(), before.stride())
        assert bits(after) == bits(before)
    assert near.stream.bytes_sent == far.stream.bytes_received > sum(tensor.nbytes for tensor in sent)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_slow_reader_gets_everything_in_many_partial_sends(
    ends: tuple[socket.socket, socket.socket], gathers: bool,
) -> None:
    near, far = ends
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    tensors = [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in (1, 63, 64, 65, 4_000_001)]
    message = Batch([Upload(number, header_of(tensor)) for number, tensor in enumerate(tensors)])
    calls = []
    stream = ByteStream(near, gathers=gathers)
    run = stream._run
    stream._run = lambda *args: calls.append(1) or run(*args)  # type: ignore[method-assign,func-returns-value]  # counts
    writer = threading.Thread(target=FrameStream(stream).write, args=(1, message, tensors))
    writer.start()
    data = bytearray()
    expected = frame(message, *tensors)
    while len(data) < len(expected):
        time.sleep(0.0002)
        data += far.recv(20_000)
    writer.join(10)
    assert data == expected
    assert len(calls) > 20


def test_small_neighbours_travel_in_one_packet_where_the_system_cannot_gather() -> None:
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET) if hasattr(socket, "SOCK_SEQPACKET") else (None, None)
    if near is None or far is None:
        pytest.skip("needs sockets that keep the borders of messages")
    tensor = torch.ones(5)
    FrameStream(ByteStream(near, gathers=False)).write(1, Batch([Upload(1, header_of(tensor))]), [tensor])
    assert far.recv(2**16) == frame(Batch([Upload(1, header_of(tensor))]), tensor)
    near.close()
    far.close()


def corpus_frames() -> list[tuple[str, bytes, str]]:
    cases = [(f"{path.stem}-{case['id']}", bytes.fromhex(case["frame"]), case.get("message", ""))
             for path in sorted(CORPUS.glob("*.json")) for case in json.loads(path.read_text())["cases"]]
    return [case for case in cases if case[2]]


@pytest.mark.parametrize(("data", "kind"), [pytest.param(data, kind, id=name) for name, data, kind in corpus_frames()])
def test_a_frame_sliced_at_any_point_is_the_same_frame(connect: Callable[..., Pair], data: bytes, kind: str) -> None:
    pair = connect()
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.extend(pair.channel.receive() for _ in range(len(data))))
    reader.start()
    stream = pair.channel._frames.stream
    for cut in range(len(data)):
        pair.client.sendall(data[:cut])
        deadline = time.monotonic() + 10
        while stream.bytes_received < cut + len(data) * cut and time.monotonic() < deadline:
            pass
        assert stream.bytes_received == cut + len(data) * cut
        pair.client.sendall(data[cut:])
    reader.join(10)
    first = received[0]
    assert type(first[1]).__name__ == kind
    assert len(received) == len(data)
    for sequence, message, tensors in received:
        assert (sequence, message) == first[:2]
        assert [bits(tensor) for tensor in tensors] == [bits(tensor) for tensor in first[2]]


def test_the_corpus_has_frames_of_every_kind() -> None:
    assert {kind for _, _, kind in corpus_frames()} == {"Hello", "Welcome", "Refusal", "Batch", "Result"}


def test_half_a_frame_and_then_the_end_is_a_broken_connection(connect: Callable[..., Pair]) -> None:
    data = frame(Batch([Upload(1, header_of(torch.ones(3)))]), torch.ones(3))
    for cut in range(1, len(data)):
        pair = connect()
        pair.client.sendall(data[:cut])
        pair.client.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match="in the middle of a frame") as caught:
            pair.channel.receive()
        assert pair.channel.peer in str(caught.value)
    pair = connect()
    pair.client.sendall(data)
    pair.client.shutdown(socket.SHUT_WR)
    assert pair.channel.receive() is not None
    assert pair.channel.receive() is None


@pytest.mark.parametrize(("head", "expected"), [
    (encode_head(1, 256 * 2**20, 0), "A header of 268435456 bytes"),
    (encode_head(1, 10, 2**62), "A body of"),
    (encode_head(1, 10, 16 * 2**30 + 1), "A body of"),
    (HEAD.pack(b"GET ", PROTOCOL_VERSION, 0, 1, 10, 0, 0), "not a djinn frame"),
    (HEAD.pack(MAGIC, PROTOCOL_VERSION, 1, 1, 10, 0, 0), "Reserved bits"),
    (HEAD.pack(MAGIC, PROTOCOL_VERSION, 0, 1, 10, 9, 0), "Reserved bits"),
    (HEAD.pack(MAGIC, PROTOCOL_VERSION + 1, 0, 1, 10, 0, 0), "speaks protocol 2"),
])
def test_a_head_that_lies_is_refused_before_anything_else_is_read(
    connect: Callable[..., Pair], head: bytes, expected: str,
) -> None:
    pair = connect()
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
def test_before_the_greeting_a_frame_is_small_and_has_no_body(connect: Callable[..., Pair], data: bytes) -> None:
    pair = connect(greeted=False)
    pair.client.sendall(data)
    with pytest.raises(ProtocolError, match="is the limit"):
        pair.channel.receive()
    later = connect()
    later.client.sendall(data)
    later.client.shutdown(socket.SHUT_WR)
    if len(data) > HEAD.size:
        assert later.channel.receive() is not None
    else:
        with pytest.raises(TransportError, match="in the middle of a frame"):
            later.channel.receive()


def test_a_header_that_never_comes_takes_no_memory(connect: Callable[..., Pair]) -> None:
    pair = connect()
    pair.client.sendall(encode_head(1, MAX_HEADER_BYTES, 0) + b"\x80" * 1000)
    pair.client.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    try:
        with pytest.raises(TransportError):
            pair.channel.receive()
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()


def test_a_long_header_comes_in_pieces(connect: Callable[..., Pair]) -> None:
    pair = connect()
    message = Batch([Free(tuple(range(2**33, 2**33 + 100_000)))])
    data = frame_in_background(message)
    writer = threading.Thread(target=pair.client.sendall, args=(data,))
    writer.start()
    assert pair.channel.receive() == (1, message, [])
    writer.join(10)


def frame_in_background(message: messages.Message) -> bytes:
    header = messages.encode(message)
    assert len(header) > 3 * 2**18
    return encode_head(1, len(header), 0) + header


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process can be limited and read on Linux")
def test_bodies_that_never_come_take_no_memory(connect: Callable[..., Pair]) -> None:
    described = TensorHeader("uint8", (64 * 2**10 - 8,), (1,))
    message = Batch([Upload(number, described) for number in range(100_000)])
    header = messages.encode(message)
    pair = connect()
    writer = threading.Thread(target=pair.client.sendall,
                              args=(encode_head(1, len(header), 100_000 * 64 * 2**10) + header + b"x" * 1000,))
    writer.start()
    before = resident_bytes()
    reader = threading.Thread(target=expect_broken, args=(pair.channel,))
    reader.start()
    writer.join(20)
    time.sleep(0.5)
    grown = resident_bytes() - before
    pair.client.shutdown(socket.SHUT_WR)
    reader.join(20)
    # The header itself takes some 60 MB as objects; what it announces is 6.5 GB, and would be 400 MB in touched pages.
    assert 0 < grown < 200 * 2**20


def expect_broken(channel: TcpChannel) -> None:
    with pytest.raises(TransportError):
        channel.receive()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process can be limited on Linux")
def test_a_body_that_cannot_be_allocated_is_a_protocol_error(connect: Callable[..., Pair]) -> None:
    pair = connect()
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


def test_tensors_that_are_not_what_the_message_says_are_not_sent() -> None:
    near, far = socket.socketpair()
    stream = FrameStream(ByteStream(near))
    message = Batch([Upload(1, TensorHeader("float32", (3,), (1,)))])
    for tensors in ([], [torch.ones(4)], [torch.ones(3, device="meta")], [torch.ones(3), torch.ones(3)]):
        with pytest.raises(ProtocolError, match="The message describes"):
            stream.write(1, message, tensors)
    assert stream.stream.bytes_sent == 0
    near.close()
    far.close()


@pytest.mark.parametrize(("drip_s", "at_least_s"), [(None, 0.3), (0.05, 0.3)])
def test_a_greeting_takes_its_time_at_most_however_it_drips(
    connect: Callable[..., Pair], drip_s: float | None, at_least_s: float,
) -> None:
    pair = connect(greeted=False, greeting_timeout_s=0.4, progress_timeout_s=10.0)
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
    assert at_least_s < time.monotonic() - began < 3


def test_a_frame_that_has_begun_must_not_stand_still(connect: Callable[..., Pair]) -> None:
    pair = connect(progress_timeout_s=0.3)
    data = frame(Batch([Upload(1, header_of(torch.ones(3)))]), torch.ones(3))
    time.sleep(0.6)  # between frames there is no limit
    pair.client.sendall(data)
    assert pair.channel.receive() is not None
    pair.client.sendall(data[:50])
    began = time.monotonic()
    with pytest.raises(RemoteTimeoutError, match=r"nothing moved for 0\.3 s"):
        pair.channel.receive()
    assert time.monotonic() - began < 3


def test_between_frames_a_client_may_be_quiet_for_as_long_as_it_likes(connect: Callable[..., Pair]) -> None:
    pair = connect(progress_timeout_s=0.2, greeting_timeout_s=0.2)
    received: list[Any] = []
    reader = threading.Thread(target=lambda: received.append(pair.channel.receive()))
    reader.start()
    time.sleep(1.5)
    pair.client.sendall(frame(Batch(synchronize=True)))
    reader.join(10)
    assert received == [(1, Batch(synchronize=True), [])]


def test_a_client_that_does_not_take_its_answer_is_given_up(connect: Callable[..., Pair]) -> None:
    pair = connect(progress_timeout_s=0.5)
    answer = torch.zeros(2**25)
    began = time.monotonic()
    with pytest.raises(TransportError):
        pair.channel.send(1, Result((header_of(answer),)), [answer])
    assert time.monotonic() - began < 10


def test_closing_a_listener_or_channel_from_another_thread_wakes_it(connect: Callable[..., Pair]) -> None:
    pair = connect()
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
