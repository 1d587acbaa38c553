"""A network that a test can break: a TCP proxy with the vocabulary of Toxiproxy, scripted in Python.

::

    with FaultProxy(server.port, upstream=[BitFlip([1000])], downstream=[Latency(0.05)]) as proxy:
        connect(proxy.address, ConnectOptions())

``upstream`` is what clients say, ``downstream`` what servers answer. Faults apply to connections that begin after they
were set; `FaultProxy.vanish` and `FaultProxy.reset` strike those that exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, Self

import attrs

CHUNK_BYTES = 2**16
MAX_CHUNKS = 64
"""What may be under way in one direction; then the sender waits, as for a full window."""
ATTACH_FILTER, DETACH_FILTER = 26, 27
PACING_S = 0.05


@attrs.frozen
class Chunk:
    """Bytes on their way, and when they were sent on the monotonic clock."""

    data: bytes
    sent_at: float


class ResetError(Exception):
    """A fault: both ends are told that the connection was reset."""


class CutError(Exception):
    """A fault: the connection ends as if both sides had closed it."""


class Fault(Protocol):
    """What may happen to one direction of a connection."""

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Give on what comes, changed, late, or not at all. Called once per connection.

        Raises:
            ResetError, CutError: The connection ends here.
        """


@attrs.frozen
class Latency:
    """Everything takes longer, with as much under way as before."""

    delay_s: float

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            time.sleep(max(0.0, chunk.sent_at + self.delay_s - time.monotonic()))
            yield chunk


@attrs.frozen
class Bandwidth:
    """No more than so many bytes a second, the first of them at once."""

    bytes_per_s: float

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        piece_bytes = max(1, int(self.bytes_per_s * PACING_S))
        for chunk in chunks:
            for begin in range(0, len(chunk.data), piece_bytes):
                piece = chunk.data[begin:begin + piece_bytes]
                yield Chunk(piece, chunk.sent_at)
                time.sleep(len(piece) / self.bytes_per_s)


@attrs.frozen
class Slicer:
    """The stream comes in pieces.

    Attributes:
        cuts: Positions in the stream at which a piece ends.
        every_bytes: Or how long each piece is; 0 for whole chunks.
        pause_s: Between pieces.
    """

    cuts: Sequence[int] = ()
    every_bytes: int = 0
    pause_s: float = 0.0

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        position = 0
        for chunk in chunks:
            length = len(chunk.data)
            within = [cut - position for cut in self.cuts if position < cut < position + length]
            if self.every_bytes:
                first = -position % self.every_bytes
                within += range(first or self.every_bytes, length, self.every_bytes)
            ends = [*sorted(set(within)), length]
            for begin, end in zip([0, *ends], ends, strict=False):
                yield Chunk(chunk.data[begin:end], chunk.sent_at)
                time.sleep(self.pause_s if end < length or position + end in self.cuts else 0)
            position += length


@attrs.frozen
class ResetPeer:
    """After so many bytes, both sides get a reset instead of more."""

    after_bytes: int = 0

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        yield from _first(chunks, self.after_bytes)
        raise ResetError


@attrs.frozen
class LimitData:
    """After so many bytes, the connection is closed."""

    after_bytes: int

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        yield from _first(chunks, self.after_bytes)
        raise CutError


@attrs.frozen
class Timeout:
    """After so many bytes nothing more arrives, and the connection stays open, until both sides have given up."""

    after_bytes: int = 0

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        yield from _first(chunks, self.after_bytes)
        for _ in chunks:
            pass


@attrs.frozen
class BitFlip:
    """Bits of the stream arrive as their opposites: bit 0 is the lowest of the first byte."""

    bits: Sequence[int]

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        position = 0
        for chunk in chunks:
            data = bytearray(chunk.data)
            for bit in self.bits:
                index = bit // 8 - position
                if 0 <= index < len(data):
                    data[index] ^= 1 << bit % 8
            position += len(data)
            yield Chunk(bytes(data), chunk.sent_at)


@attrs.frozen
class SlowClose:
    """The end of the stream comes late."""

    delay_s: float

    def apply(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        yield from chunks
        time.sleep(self.delay_s)


def _first(chunks: Iterator[Chunk], length: int) -> Iterator[Chunk]:
    """Give on so many bytes. Ends when they have passed, which for none of them is when the first byte comes."""
    left = length
    for chunk in chunks:
        if left:
            yield Chunk(chunk.data[:left], chunk.sent_at)
        left -= min(left, len(chunk.data))
        if not left:
            return


@attrs.define(eq=False)
class Link:
    """One client's connection through the proxy.

    Attributes:
        client, server: The proxy's sockets to either side.
        sent, answered: What came from either, before any fault, if the proxy records.
    """

    client: socket.socket
    server: socket.socket
    sent: bytearray = attrs.Factory(bytearray)
    answered: bytearray = attrs.Factory(bytearray)
    threads: list[threading.Thread] = attrs.Factory(list)

    def end(self, *, reset: bool) -> None:
        """End both sides."""
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                if reset:
                    # To connect a socket to nothing resets it, even while a thread waits for it; to close it does not.
                    ctypes.CDLL(None).connect(sock.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16)
                else:
                    sock.shutdown(socket.SHUT_RDWR)

    @property
    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)


class FaultProxy:
    """Carries connections to a port of this machine, with faults.

    Args:
        port: The server's.
        upstream: What happens to what clients say.
        downstream: What happens to what the server answers.
        records: Whether to keep all that passes.
        buffer_bytes: Of each of the proxy's sockets; 0 for the system's default.

    Attributes:
        links: All connections so far.
    """

    def __init__(self, port: int, *, upstream: Iterable[Fault] = (), downstream: Iterable[Fault] = (),
                 records: bool = False, buffer_bytes: int = 0) -> None:
        self.upstream, self.downstream = list(upstream), list(downstream)
        self.links: list[Link] = []
        self._target = ("127.0.0.1", port)
        self._records = records
        self._buffer_bytes = buffer_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        if buffer_bytes:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.port = self._listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def vanish(self) -> None:
        """Have both machines vanish from each other's network: not even an acknowledgement passes. On Linux.

        Nobody can connect either.
        """
        self._filter(socket.SOL_SOCKET, ATTACH_FILTER)

    def heal(self) -> None:
        """Undo `vanish`; TCP sends again what was lost."""
        self._filter(socket.SOL_SOCKET, DETACH_FILTER)

    def reset(self) -> None:
        """Reset every connection."""
        for link in self.links:
            link.end(reset=True)

    def black_out(self, duration_s: float) -> None:
        """Have the network break: connections are reset, and for so long nobody can connect. On Linux."""
        self.vanish()
        self.reset()
        time.sleep(duration_s)
        self.heal()

    def close(self) -> None:
        """End everything."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self.links:
            link.end(reset=False)
            link.client.close()
            link.server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _filter(self, level: int, option: int) -> None:
        if not sys.platform.startswith("linux"):
            raise NotImplementedError("only Linux can drop what comes for a socket")
        # BPF "return 0": keep no byte of any packet. The kernel drops them before TCP sees them.
        program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
        sockets = [self._listener, *(sock for link in self.links for sock in (link.client, link.server))]
        for sock in sockets:
            if sock.fileno() >= 0:
                with contextlib.suppress(OSError):
                    sock.setsockopt(level, option, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                link = Link(client, self._reach_server())
            except OSError:
                client.close()
                continue
            for sock in (link.client, link.server):
                with contextlib.suppress(OSError):  # it is over already
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.links.append(link)
            ways = ((link.client, link.server, self.upstream, link.sent),
                    (link.server, link.client, self.downstream, link.answered))
            for source, target, faults, record in ways:
                link.threads.append(threading.Thread(
                    target=self._carry, args=(link, source, target, list(faults), record), daemon=True))
            for thread in link.threads:
                thread.start()

    def _reach_server(self) -> socket.socket:
        server = socket.socket()
        if self._buffer_bytes:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        server.connect(self._target)
        return server

    def _carry(self, link: Link, source: socket.socket, target: socket.socket, faults: Sequence[Fault],
               record: bytearray) -> None:
        chunks = self._arriving(source, record)
        for fault in faults:
            chunks = fault.apply(chunks)
        try:
            for chunk in chunks:
                target.sendall(chunk.data)
            target.shutdown(socket.SHUT_WR)
        except ResetError:
            link.end(reset=True)
        except CutError:
            link.end(reset=False)
        except OSError:
            # The receiver is gone, which its sender learns, unless it is gone as well.
            with contextlib.suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)

    def _arriving(self, source: socket.socket, record: bytearray) -> Iterator[Chunk]:
        """What comes from one side, read as soon as it comes: how long it travels is up to the faults."""
        under_way: queue.Queue[Chunk] = queue.Queue(1 if self._buffer_bytes else MAX_CHUNKS)

        def read() -> None:
            data = b"-"
            while data:
                try:
                    data = source.recv(CHUNK_BYTES)
                except OSError:
                    # Reset by its sender: for the receiver, the end.
                    data = b""
                if self._records:
                    record.extend(data)
                under_way.put(Chunk(data, time.monotonic()))

        threading.Thread(target=read, daemon=True).start()
        while (chunk := under_way.get()).data:
            yield chunk
