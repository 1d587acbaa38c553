"""Frames over real sockets: whole, sliced, cut short."""

from __future__ import annotations

import ctypes
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.servers.tcp import frame

from djinn.errors import ProtocolError, TransportError
from djinn.wire.messages import Batch, Free, Result, TensorHeader, Upload
from djinn.wire.tensors import DTYPES, header_of
from djinn_plugins.transport.tcp import sockets
from djinn_plugins.transport.tcp.sockets import ByteStream
from djinn_plugins.transport.tcp.stream import FrameStream

CORPUS = Path(__file__).parents[2] / "specs" / "wire"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        yield near, far


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
    ends: tuple[socket.socket, socket.socket], gathers: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "TICK_S", 0.002)
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
        time.sleep(0.002)
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
def test_a_frame_sliced_at_any_point_is_the_same_frame(connect_raw: Callable[..., Any], data: bytes, kind: str) -> None:
    pair = connect_raw()
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
    assert {kind for _, _, kind in corpus_frames()} == {
        "Hello", "Welcome", "Redirect", "Starting", "Refusal", "Batch", "Result", "Ack", "Goodbye", "PeerHello",
        "ValueTransfer"}


def test_half_a_frame_and_then_the_end_is_a_broken_connection(connect_raw: Callable[..., Any]) -> None:
    data = frame(Batch([Upload(1, header_of(torch.ones(3)))]), torch.ones(3))
    for cut in range(1, len(data)):
        pair = connect_raw()
        pair.client.sendall(data[:cut])
        pair.client.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match="in the middle of a frame") as caught:
            pair.channel.receive()
        assert pair.channel.peer in str(caught.value)
    pair = connect_raw()
    pair.client.sendall(data)
    pair.client.shutdown(socket.SHUT_WR)
    assert pair.channel.receive() is not None
    assert pair.channel.receive() is None


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


def test_a_long_header_comes_in_pieces(connect_raw: Callable[..., Any]) -> None:
    pair = connect_raw()
    message = Batch([Free(tuple(range(2**33, 2**33 + 100_000)))])
    data = frame(message)
    assert len(data) > 3 * 2**18
    writer = threading.Thread(target=pair.client.sendall, args=(data,))
    writer.start()
    assert pair.channel.receive() == (1, message, [])
    writer.join(10)
