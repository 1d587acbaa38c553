"""Queue of outgoing data: recording continues while a connection is slow, up to a limit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from djinn_plugins.transport.tcp.sockets import TICK_S, ByteStream

__all__ = ("MAX_QUEUED_BYTES", "Outbox")

MAX_QUEUED_BYTES = 32 * 2**20
"""Maximum size of the queue; senders of more data block."""


class Outbox:
    """Sends data in order. Data that the connection does not take at once is copied, and sent by a temporary thread.

    Attributes:
        end_bytes: Value of the stream's ``bytes_sent`` when everything is sent that was given.
        error: Why nothing more can be sent, once that is known.

    Concurrency:
        One thread at a time sends; `close` may be called by any.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._is_sending = False
        self._closed = False
        self.end_bytes = 0
        self.error: Exception | None = None

    @property
    def queued_bytes(self) -> int:
        """Number of queued bytes."""
        return self._queued_bytes

    def send(self, views: Sequence[memoryview], *, waits: bool, is_kept: bool = False) -> None:
        """Send the views in order, after all earlier data. They may change once this returns.

        Args:
            views: The data to send.
            waits: The caller will wait for an answer, so returning early has no benefit.
            is_kept: The views do not change until they have been sent, so they need not be copied.

        Raises:
            TimeoutError: The connection stalled for too long.
            OSError: The connection broke, now or while earlier data was sent.
        """
        rest, length = views, sum(map(len, views))
        self.end_bytes = self._stream.bytes_sent + self._queued_bytes + length
        if not self._queued_bytes and self.error is None:
            if waits or length > MAX_QUEUED_BYTES:
                self._stream.send(views)
                return
            rest = self._stream.send_ready(views)
            if not rest:
                return
        if not self._stream.is_ours:
            raise OSError("it belongs to the process that this one was forked from")
        length = sum(map(len, rest))
        if self._wait_for_room(length):
            self._append(rest, length, is_kept=is_kept)
        else:
            self._stream.send(rest)

    def drain(self, patience_s: float) -> None:
        """Wait until the queue is empty, or the time is over."""
        if self._stream.is_ours:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.error is not None or not self._queued_bytes,
                                       patience_s)

    def close(self) -> None:
        """Stop sending, and wake threads that wait for space."""
        if not self._stream.is_ours:
            # Another thread of the parent may have held the lock when this process was forked.
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for_room(self, length: int) -> bool:
        """Wait until the given number of bytes fits into the queue; if they never can, wait until it is empty."""
        fits = length <= MAX_QUEUED_BYTES
        with self._changed:
            while not self._changed.wait_for(lambda: self.error is not None or self._closed or (
                    self._queued_bytes + length <= (MAX_QUEUED_BYTES if fits else length)), TICK_S):
                # A signal right before a thread falls asleep does not wake it, so signals are handled here.
                pass
            if self.error is not None:
                raise self.error
            if self._closed:
                raise OSError("it was closed")
        return fits

    def _append(self, views: Sequence[memoryview], length: int, *, is_kept: bool) -> None:
        copied = views if is_kept else [memoryview(b"".join(views))]
        with self._changed:
            self._queue.extend(copied)
            self._queued_bytes += length
            starts, self._is_sending = not self._is_sending, True
        if starts:
            threading.Thread(target=self._send_queued, name="djinn-outbox", daemon=True).start()

    def _send_queued(self) -> None:
        while True:
            with self._changed:
                if self._closed or not self._queue:
                    self._is_sending = False
                    return
                views = list(self._queue)
                self._queue.clear()
            length = sum(map(len, views))
            try:
                self._stream.send(views)
            except Exception as error:  # noqa: BLE001  # not swallowed: raised by the next `send`, see `error`
                self._fail(error)
                return
            with self._changed:
                self._queued_bytes -= length
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._queue.clear()
            self._changed.notify_all()
        if isinstance(error, TimeoutError):
            # Close it, because a thread that waits for an answer would not notice. It does notice if the connection
            # broke, and may then read the server's reason. a reason to be read.
            self._stream.close()
