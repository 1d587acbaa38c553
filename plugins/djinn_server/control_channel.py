"""Channels between the gateway, its workers and the forkserver: messages and descriptors over a pair of sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.lowlevel
import msgspec

from djinn_server.control import ControlMessage

__all__ = ("AwaitedControl", "Control")

T = TypeVar("T")
SEND_TIMEOUT_S = 5.0
"""How long the other end may take to read a message; the thread that reads messages does nothing else."""
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 2**20
_log = logging.getLogger("djinn.server")
_decoder = msgspec.msgpack.Decoder(ControlMessage)


class Control:
    """One end of a channel, for threads.

    Args:
        sock: One of a pair of stream sockets.
        takes_descriptors: Whether descriptors are expected; unexpected ones are closed.
        send_timeout_s: How long the other end may take to read a message.

    Concurrency:
        Any thread sends; one receives.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False,
                 send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._socket = sock
        self._takes_descriptors = takes_descriptors
        self._lock = threading.Lock()
        timeout = struct.pack("@ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def send(self, message: ControlMessage, descriptor: int | None = None) -> None:
        """Send a message, optionally with a descriptor. The descriptor still belongs to the caller.

        Raises:
            OSError: The other end is gone.
        """
        data = _encoded(message)
        with self._lock:
            sent = 0 if descriptor is None else socket.send_fds(self._socket, [data], [descriptor])
            self._socket.sendall(data[sent:])

    def receive(self) -> tuple[ControlMessage, int | None] | None:
        """Wait for a message and its descriptor; ``None`` if the other end is gone or sent something invalid."""
        try:
            head, descriptor = self._read_head()
            length = _length_of(head)
            data = b"" if length is None else self._read(length)
            return None if length is None or len(data) < length else (_decoder.decode(data), descriptor)
        except (OSError, msgspec.DecodeError):
            return None

    def close(self) -> None:
        """Close this end and wake threads that wait on it. Never raises."""
        _close(self._socket)

    def _read_head(self) -> tuple[bytes, int | None]:
        head, found = b"", list[int]()
        while len(head) < _LENGTH.size:
            part, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size - len(head), 1)
            found += descriptors
            if not part:
                break
            head += part
        return head, _only(found, self._takes_descriptors)

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self._socket.recv(length - len(data))
            if not part:
                break
            data += part
        return data


class AwaitedControl:
    """One end of a channel, for an event loop: a worker that reads nothing holds up only the messages to it.

    Args:
        sock: One of a pair of stream sockets.
        takes_descriptors: Whether descriptors are expected; unexpected ones are closed.

    Concurrency:
        Tasks of one event loop; one receives.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._takes_descriptors = takes_descriptors
        self._sending = anyio.Lock()

    async def send(self, message: ControlMessage, descriptor: int | None = None) -> None:
        """Send a message, optionally with a descriptor. The descriptor still belongs to the caller.

        Raises:
            OSError: The other end is gone, or does not read.
        """
        data = _encoded(message)
        with anyio.fail_after(SEND_TIMEOUT_S):
            async with self._sending:
                sent = await self._ready(lambda: self._send(data, descriptor), to_write=True)
                try:
                    while sent < len(data):
                        sent += await self._ready(lambda: self._socket.send(data[sent:]), to_write=True)  # noqa: B023  # called at once
                finally:
                    if sent < len(data):
                        # The other end would take the next message for the rest of this one.
                        self.shut_down()

    async def answer(self, message: ControlMessage, descriptor: int | None = None) -> None:
        """Send a message, and close its descriptor; an end that is gone is ignored."""
        try:
            await self.send(message, descriptor)
        except OSError as error:
            _log.info("a worker that asked is gone: %s", error)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    async def receive(self) -> tuple[ControlMessage, int | None] | None:
        """Wait for a message and its descriptor; ``None`` if the other end is gone or sent something invalid."""
        # One end that always has something to say must not keep others waiting.
        await anyio.lowlevel.checkpoint()
        found = list[int]()
        try:
            head = await self._read(_LENGTH.size, found)
            length = _length_of(head)
            data = b"" if length is None else await self._read(length, found)
            descriptor = _only(found, self._takes_descriptors)
            return None if length is None or len(data) < length else (_decoder.decode(data), descriptor)
        except (OSError, msgspec.DecodeError):
            return None

    def shut_down(self) -> None:
        """End the channel, which both ends notice. Never raises."""
        _shut_down(self._socket)

    def close(self) -> None:
        """Close this end, for which no task waits any more. Never raises."""
        _close(self._socket)

    def _send(self, data: bytes, descriptor: int | None) -> int:
        return (self._socket.send(data) if descriptor is None
                else socket.send_fds(self._socket, [data], [descriptor]))

    async def _read(self, length: int, found: list[int]) -> bytes:
        data = b""
        while len(data) < length:
            part, descriptors, _, _ = await self._ready(
                lambda: socket.recv_fds(self._socket, length - len(data), 1))  # noqa: B023  # called at once
            found += descriptors
            if not part:
                break
            data += part
        return data

    async def _ready(self, call: Callable[[], T], *, to_write: bool = False) -> T:
        while True:
            try:
                return call()
            except BlockingIOError:
                await (anyio.wait_writable(self._socket) if to_write else anyio.wait_readable(self._socket))


def _encoded(message: ControlMessage) -> bytes:
    header = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(header)) + header


def _length_of(head: bytes) -> int | None:
    """Return the length that a head announces; ``None`` if it announces none that is permitted."""
    if len(head) < _LENGTH.size:
        return None
    length: int = _LENGTH.unpack(head)[0]
    return None if length > _MAX_BYTES else length


def _only(found: list[int], takes_descriptors: bool) -> int | None:
    """Return the descriptor of a message, not inherited by other programs; close unexpected ones."""
    while found and (len(found) > 1 or not takes_descriptors):
        os.close(found.pop())
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return found[0] if found else None


def _close(sock: socket.socket) -> None:
    _shut_down(sock)
    sock.close()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end is already gone, so there is nothing to shut down
        sock.shutdown(socket.SHUT_RDWR)
