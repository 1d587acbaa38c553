"""Channels between the gateway, its workers and the forkserver: messages and descriptors over a pair of sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from time import thread_time
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.server.changes import Changes
from djinn_plugins.server.control import ControlMessage, FromWorker, TurnRequest
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.pacing import Pacing

__all__ = ("ANYTHING", "FROM_WORKER", "TURN_REQUESTS", "AwaitedControl", "Control")

T = TypeVar("T")
SEND_TIMEOUT_S = 5.0
"""How long the other end may take to read a message; the thread that reads messages does nothing else."""
ANSWER_TIMEOUT_S = 30.0
"""How long a worker may leave the answers to its questions unread."""
MAX_UNANSWERED = 32
"""Questions of a worker that the gateway works on, or whose answers are not read yet; it reads no more meanwhile.
Workers wait on their side before they ask more; see `djinn_plugins.server.pending_replies`."""
MAX_BYTES = 2**20
"""Of a message from a process that is not trusted."""
MAX_TRUSTED_BYTES = 2**26
"""Of a message from the gateway, such as a list of many models."""
Messages: TypeAlias = msgspec.msgpack.Decoder[Any]
_LENGTH = struct.Struct("<I")
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)
ANYTHING: Messages = msgspec.msgpack.Decoder(ControlMessage)
FROM_WORKER: Messages = msgspec.msgpack.Decoder(FromWorker)
"""Nothing else that a worker says is built."""
TURN_REQUESTS: Messages = msgspec.msgpack.Decoder(TurnRequest)
_INVALID = (OSError, ValueError, RecursionError, OverflowError)
"""What reading and decoding raise; text that is no UTF-8 and what is nested too deeply are no `msgspec.DecodeError`."""


class Control:
    """One end of a channel, for threads.

    Args:
        sock: One of a pair of stream sockets.
        takes_descriptors: Whether descriptors are expected; otherwise, the system discards them.
        send_timeout_s: How long the other end may take to read a message.
        messages: Decodes those that are expected. An end that may send anything is trusted; others are paced.

    Concurrency:
        Any thread sends; one receives.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False,
                 send_timeout_s: float = SEND_TIMEOUT_S, messages: Messages = ANYTHING) -> None:
        self._socket = sock
        self._takes_descriptors = takes_descriptors
        self._messages = messages
        self._pacing = None if messages is ANYTHING else Pacing()
        self._since_s = 0.0
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
        if self._pacing is not None and self._since_s:
            self._pacing.add(thread_time() - self._since_s)
            time.sleep(self._pacing.pause_s())
        found = list[int]()
        try:
            head = self._read_head(found)
            length = _length_of(head, MAX_TRUSTED_BYTES if self._pacing is None else MAX_BYTES)
            data = b"" if length is None else self._read(length)
            self._since_s = thread_time()
            if length is not None and len(data) == length:
                return self._messages.decode(data), found.pop() if found else None
        except _INVALID:
            pass
        finally:
            if found:
                os.close(found.pop())
        return None

    def close(self) -> None:
        """Close this end and wake threads that wait on it. Never raises."""
        _close(self._socket)

    def _read_head(self, found: list[int]) -> bytes:
        head = b""
        while len(head) < _LENGTH.size:
            wanted = _LENGTH.size - len(head)
            if self._takes_descriptors:
                part, descriptors, _, _ = socket.recv_fds(self._socket, wanted, 1)
                _only(found, descriptors)
            else:
                part = self._socket.recv(wanted)
            if not part:
                break
            head += part
        return head

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._socket.recv(length - len(data))
            if not part:
                break
            data += part
        return bytes(data)


class AwaitedControl:
    """One end of a channel, for an event loop, to a process that is not trusted.

    One that reads nothing holds up only the messages to it. One that asks and does not read the answers is not read
    from, and its channel ends after a while. Its messages are held to a part of the loop's time.

    Args:
        sock: One of a pair of stream sockets.
        takes_descriptors: Whether descriptors are expected; otherwise, the system discards them.
        messages: Decodes those that are expected.

    Concurrency:
        Tasks of one event loop; one receives.
    """

    def __init__(self, sock: socket.socket, *, takes_descriptors: bool = False, messages: Messages = ANYTHING) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._takes_descriptors = takes_descriptors
        self._messages = messages
        self._sending = anyio.Lock()
        self._in_turn = anyio.Lock()
        self._pacing = Pacing()
        self._since_s = 0.0
        self._changes = Changes()
        self._unanswered = 0
        self._is_shut = False

    async def send(self, message: ControlMessage, descriptor: int | None = None, timeout_s: float = 0.0) -> None:
        """Send a message, optionally with a descriptor. The descriptor still belongs to the caller.

        Args:
            message: The message.
            descriptor: The descriptor.
            timeout_s: How long the other end may take to read it; 0 for the usual time.

        Raises:
            OSError: The other end is gone, or does not read.
        """
        data = _encoded(message)
        with anyio.fail_after(timeout_s or SEND_TIMEOUT_S):
            async with self._sending:
                sent = await self._ready(lambda: self._send(data, descriptor), to_write=True)
                try:
                    while sent < len(data):
                        sent += await self._ready(lambda: self._socket.send(data[sent:]), to_write=True)  # noqa: B023  # called at once
                finally:
                    if sent < len(data):
                        # The other end would take the next message for the rest of this one.
                        self.shut_down()

    def question(self, tasks: Tasks, answer: Callable[[], Awaitable[tuple[ControlMessage, int | None]]], *,
                 in_turn: bool = False) -> None:
        """Answer a question in a task; returns at once. Few are answered at a time, and `receive` waits meanwhile.

        Args:
            tasks: Where it is answered.
            answer: Makes the answer and its descriptor, which is closed afterwards.
            in_turn: Whether it is not made before the answers to earlier such questions are read.
        """
        self._unanswered += 1
        tasks.spawn(self._answer, answer, in_turn)

    def charge(self, spent_s: float) -> None:
        """Count time that another thread has spent for this end."""
        self._pacing.add(spent_s)

    async def _answer(self, answer: Callable[[], Awaitable[tuple[ControlMessage, int | None]]], in_turn: bool) -> None:
        try:
            async with self._in_turn if in_turn else nullcontext():
                if self._is_shut:
                    return
                message, descriptor = await answer()
                try:
                    await self.send(message, descriptor, ANSWER_TIMEOUT_S)
                finally:
                    if descriptor is not None:
                        os.close(descriptor)
        except TimeoutError:
            _log.warning("a worker asks, and has not read an answer for %g s: its channel ends", ANSWER_TIMEOUT_S)
            self.shut_down()
        except OSError as error:
            _strangers.write(logging.INFO, "workers that asked and are gone", "a worker that asked is gone: %s", error)
        finally:
            self._unanswered -= 1
            self._changes.notify()

    async def receive(self) -> tuple[ControlMessage, int | None] | None:
        """Wait for a message and its descriptor; ``None`` if the other end is gone or sent something invalid."""
        await self._pace()
        if self._is_shut:
            return None
        found = list[int]()
        try:
            head = await self._read(_LENGTH.size, found)
            length = _length_of(head, MAX_BYTES)
            data = b"" if length is None else await self._read(length, found)
            self._since_s = thread_time()
            if length is not None and len(data) == length:
                return self._messages.decode(data), found.pop() if found else None
        except _INVALID as error:
            if not isinstance(error, OSError):
                _strangers.write(logging.WARNING, "invalid messages", "a channel ends, since a message is invalid: %s",
                                 error)
        finally:
            if found:
                os.close(found.pop())
        return None

    async def _pace(self) -> None:
        """Wait as long as this end may send nothing more."""
        if self._since_s:
            # What was decoded, and what was done with it since: no other task has run.
            self._pacing.add(thread_time() - self._since_s)
            self._since_s = 0.0
        # One end that always has something to say must not keep others waiting.
        await anyio.sleep(self._pacing.pause_s())
        await self._changes.wait_for(lambda: self._unanswered < MAX_UNANSWERED)

    def shut_down(self) -> None:
        """End the channel, which both ends notice. Never raises."""
        self._is_shut = True
        _shut_down(self._socket)

    def close(self) -> None:
        """Close this end, for which no task waits any more. Never raises."""
        _close(self._socket)

    def _send(self, data: bytes, descriptor: int | None) -> int:
        return (self._socket.send(data) if descriptor is None
                else socket.send_fds(self._socket, [data], [descriptor]))

    async def _read(self, length: int, found: list[int]) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = await self._ready(lambda: self._received(length - len(data), found))  # noqa: B023  # called at once
            if not part:
                break
            data += part
        return bytes(data)

    def _received(self, length: int, found: list[int]) -> bytes:
        begun_s = thread_time()
        try:
            if not self._takes_descriptors:
                return self._socket.recv(length)
            data, descriptors, _, _ = socket.recv_fds(self._socket, length, 1)
        finally:
            self._pacing.add(thread_time() - begun_s)
        # At once: a message may come in many pieces, each with one.
        _only(found, descriptors)
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


def _length_of(head: bytes, most: int) -> int | None:
    """Return the length that a head announces; ``None`` if it announces none that is permitted."""
    if len(head) < _LENGTH.size:
        return None
    length: int = _LENGTH.unpack(head)[0]
    return None if length > most else length


def _only(found: list[int], more: list[int]) -> None:
    """Add the descriptor of a message, not inherited by other programs; close unexpected ones."""
    for descriptor in more:
        if found:
            os.close(descriptor)
        else:
            os.set_inheritable(descriptor, False)
            found.append(descriptor)


def _close(sock: socket.socket) -> None:
    _shut_down(sock)
    sock.close()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end is already gone, so there is nothing to shut down
        sock.shutdown(socket.SHUT_RDWR)
