"""What several tests of the TCP transport need."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import pytest
import torch

from djinn.errors import TransportError
from djinn.wire import messages
from djinn.wire.messages import PROTOCOL_VERSION, Batch, Result, Welcome
from djinn_plugins.common.wire.frames import SHORT_HEAD, decode_head, head_bytes
from djinn_plugins.transport.tcp.client import SocketConnection
from djinn_plugins.transport.tcp.listener import SocketChannel
from djinn_plugins.transport.tcp.sockets import ByteStream
from djinn_plugins.transport.tcp.stream import FrameStream

WELCOME = Welcome(PROTOCOL_VERSION, "2.13.0", "3.11.7", sys.byteorder, "cpu", "0" * 32)
SYNCHRONIZE = Batch(synchronize=True)
EMPTY = Result()
tcp_only = pytest.mark.parametrize("serve", ["tcp"], indirect=True)
"""For what only connections between machines have."""


def raw_socket(end: SocketConnection | SocketChannel) -> socket.socket:
    return end._frames.stream._socket


def answer(channel: SocketChannel, result: Result = EMPTY, tensors: Any = ()) -> Any:
    received = channel.receive()
    assert received is not None
    channel.send(received[0], result, tensors)
    return received


def expect_closed(connection: SocketConnection) -> None:
    """After any error, everything fails at once and names the address."""
    for attempt in (lambda: connection.submit(Batch(), ()), lambda: connection.request(SYNCHRONIZE, ())):
        began = time.monotonic()
        with pytest.raises(TransportError) as caught:
            attempt()
        assert time.monotonic() - began < 0.1
        assert connection.address in str(caught.value)
        assert "djinn.init" in caught.value.hint


def frame(message: messages.Message, *tensors: torch.Tensor, sequence: int = 1) -> bytes:
    """The bytes of a frame, taken from what a real stream sends."""
    near, far = socket.socketpair()
    with near, far:
        stream = ByteStream(near)
        writer = threading.Thread(target=FrameStream(stream).write, args=(sequence, message, tensors))
        writer.start()
        data = far.recv(SHORT_HEAD.size, socket.MSG_WAITALL)
        size = head_bytes(data[0])
        data += far.recv(size - len(data), socket.MSG_WAITALL) if size > len(data) else b""
        head = decode_head(data)
        while len(data) < size + head.header_bytes + head.body_bytes:
            data += far.recv(2**20)
        writer.join(10)
        assert len(data) == stream.bytes_sent
        return data
