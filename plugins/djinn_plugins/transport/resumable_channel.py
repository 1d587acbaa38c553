"""The server's end of a session that can move to another connection: a channel that outlives connections."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol, runtime_checkable

import attrs
import torch

from djinn.errors import DjinnError, OperationCancelledError, TransportError
from djinn.wire.messages import RESUME_BYTES, Ack, Batch, Goodbye, Message, Result
from djinn_plugins.common.kinds.transport import Channel, SupportsByteCounts, SupportsDigests, SupportsReceiveLimit
from djinn_plugins.transport.resumption import ServerEnd, no_session

__all__ = ("ResumableChannel", "ResumableSessions", "digest_of")

log = logging.getLogger("djinn.server")
_GOODBYE = Goodbye()
TICK_S = 0.25
"""How often a thread that waits for something else, too, looks whether its connection was replaced."""
REASON_S = 0.5
"""How long an answer that is being sent may delay the message that says why the session ends."""


@runtime_checkable
class _Pollable(Channel, Protocol):
    """Optional methods of a channel; see `djinn_plugins.common.kinds.transport.Channel`."""

    def is_ready(self) -> bool:
        """Whether `receive` would return without waiting."""


@runtime_checkable
class _Wakeable(Channel, Protocol):
    """Optional methods of a channel; see `djinn_plugins.common.kinds.transport.Channel`."""

    def wait_with(self, descriptor: int, timeout_s: float) -> bool:
        """Wait until there is something to receive, until a descriptor is readable, or for some time.

        Returns:
            Whether the descriptor is readable.
        """


@runtime_checkable
class _Watched(Channel, Protocol):
    """Optional methods of a channel; see `djinn_plugins.common.kinds.transport.Channel`."""

    def is_gone(self) -> bool:
        """Whether the other side will send nothing more, regardless of data still to be received."""


@runtime_checkable
class _Writable(Channel, Protocol):
    """Optional methods of a channel; see `djinn_plugins.common.kinds.transport.Channel`."""

    def is_writable(self) -> bool:
        """Whether a small message can be sent without waiting."""


@runtime_checkable
class _Parting(Channel, Protocol):
    """Optional methods of a channel; see `djinn_plugins.common.kinds.transport.Channel`."""

    def has_left(self) -> bool:
        """Whether the other side has said goodbye, even if earlier messages have not been received yet."""


@attrs.define(eq=False)
class _Line:
    """One of a session's connections and its abilities, looked up once because `isinstance` on protocols is slow.

    Attributes:
        heard_bytes: Bytes it had received when the last batch arrived.
        error: Why nothing can be sent on it any more. Batches that have arrived on it can still be read.
    """

    channel: Channel
    digesting: SupportsDigests | None
    counted: SupportsByteCounts | None
    pollable: _Pollable | None
    watched: _Watched | None
    writable: _Writable | None
    wakeable: _Wakeable | None
    heard_bytes: int = 0
    error: TransportError | None = None

    @classmethod
    def of(cls, channel: Channel) -> _Line:
        """Look up the abilities of a connection."""
        return cls(channel, channel if isinstance(channel, SupportsDigests) else None,
                   channel if isinstance(channel, SupportsByteCounts) else None,
                   channel if isinstance(channel, _Pollable) else None,
                   channel if isinstance(channel, _Watched) else None,
                   channel if isinstance(channel, _Writable) else None,
                   channel if isinstance(channel, _Wakeable) else None)

    def newly_heard(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return how many bytes have arrived since the last batch, or the bytes of its tensors if these are more."""
        body_bytes = sum([tensor.nbytes for tensor in tensors]) if tensors else 0
        if self.counted is None:
            return body_bytes
        before, self.heard_bytes = self.heard_bytes, self.counted.bytes_received
        return max(self.heard_bytes - before, body_bytes)


class ResumableChannel:
    """A session's channel, independent of its current connection; see `djinn_plugins.common.kinds.transport.Channel`.

    Batches arrive in order and exactly once. An answer that the client lacks is sent again on a new connection.

    Args:
        channel: The first connection, whose greeting has been answered.
        first: Number of the greeting.
        lease_s: How long to wait for another connection; 0: the session ends with this one.
        clock: Returns the time.

    Attributes:
        peer: Address of the current client.
        settle: Called when data received on a connection is of no use: the connection broke, or the batch is a
            duplicate.
        stop: Empty as long as the results of the last batch are needed, else the reason to stop; see
            `djinn_plugins.executor.service.SessionService.handle`.
        stopped: Called after ``stop`` has been filled, by the thread that filled it.

    Concurrency:
        One thread receives and sends. Any thread may call `take_up`, `is_gone` and `close`.

    Laws:
        transport.exactly_once, transport.resumed
    """

    def __init__(self, channel: Channel, first: int, lease_s: float,
                 clock: Callable[[], float] = monotonic) -> None:
        self.peer = channel.peer
        self.settle: Callable[[], None] = _nothing
        self.stop: list[DjinnError] = []
        self.stopped: Callable[[], None] = _nothing
        self._cancelled = 0
        self._end: ServerEnd[tuple[Message, Sequence[torch.Tensor]]] = ServerEnd(first, lease_s)
        self._clock = clock
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._line: _Line | None = _Line.of(channel)
        self._is_over = False
        self._is_ending = False
        self._turns = 0
        self._past = (0, 0)
        self._early: dict[int, tuple[_Line, Message]] = {}
        """Answers that were sent before their batches arrived, and the connections."""
        self._admit_body: Callable[[int], None] | None = None

    @property
    def lease_s(self) -> float:
        """How long the session waits for another connection."""
        return self._end.lease_s

    @property
    def admit_body(self) -> Callable[[int], None] | None:
        """Called before a body is read; see `djinn_plugins.common.kinds.transport.SupportsReceiveLimit`."""
        return self._admit_body

    @admit_body.setter
    def admit_body(self, admit: Callable[[int], None] | None) -> None:
        self._admit_body = admit
        if self._line is not None and isinstance(self._line.channel, SupportsReceiveLimit):
            self._line.channel.admit_body = admit

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far on all connections."""
        line = self._line
        return self._past[0] + (0 if line is None or line.counted is None else line.counted.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """Bytes received so far on all connections."""
        line = self._line
        return self._past[1] + (0 if line is None or line.counted is None else line.counted.bytes_received)

    def receive(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Wait for the next batch, on this connection or another.

        Returns:
            Its number, the batch and its tensors; ``None`` when the client has ended the session.

        Raises:
            ProtocolError: The message is not a batch, or not the next one.
            TransportError: The connection broke, and no client resumed the session in time.
        """
        while True:
            line = self._line or self._connected()
            try:
                if line.error is not None and not (line.pollable is not None and line.pollable.is_ready()):
                    raise line.error
                if not self._end.is_given:
                    self._give(line)
                received = line.channel.receive()
            except TransportError as error:
                self._lose(line, error)
                continue
            if received is None:
                if not self._end.lease_s:
                    return None
                self._lose(line, TransportError(f"The connection to {self.peer} ended without a goodbye."))
                continue
            number, message, tensors = received
            if not isinstance(message, Batch):
                return None if isinstance(message, Goodbye) else received
            digest = 0 if line.digesting is None else line.digesting.received_digest
            is_new = self._takes(line, number, digest, tensors)
            if self._end.ack_due and not (self._end.may_wait and line.pollable is not None
                                          and line.pollable.is_ready()):
                self._tell(line)
            if is_new:
                return received
            del received, message, tensors
            self.settle()

    def send(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send an answer, now or on the next connection; send other messages now.

        Raises:
            TransportError: There is no connection, and no other is possible.
        """
        line = self._line
        if isinstance(message, Result):
            if self._is_over:
                # Its failures for dropped programs do not explain the end of the session: `close` sends the reason.
                return
            early = self._early.pop(sequence, None)
            if early is not None and early[1] is message:
                message = Result(message.items, run_ns=message.run_ns)
            else:
                early = None
            self._end.finish(sequence, (message, tensors))
            if line is not None:
                try:
                    self._give(line, has_last=early is not None and early[0] is line)
                except TransportError as error:
                    self._mute(line, error)
            return
        if line is None:
            raise TransportError(f"There is no connection to {self.peer}.")
        with self._sending:
            line.channel.send(sequence, message, tensors)

    @property
    def is_clear(self) -> bool:
        """Whether a small message can be sent without waiting."""
        line = self._line
        return (not self._is_over and line is not None and line.error is None and line.writable is not None
                and line.writable.is_writable())

    def send_early(self, sequence: int, message: Result, tensors: Sequence[torch.Tensor]) -> bool:
        """Send the answer to a batch that has not arrived; return whether it was sent.

        Once the batch arrives, `send` has to be called with the same message, if it is the answer after all.
        """
        if self._line is None or self._is_over:
            return False
        self._end.promised = max(self._end.promised, sequence)
        line = self._sent(sequence, message, tensors)
        if line is None:
            return False
        self._early = {number: sent for number, sent in self._early.items() if number > self._end.received}
        self._early[sequence] = line, message
        return True

    def send_later(self, sequence: int, message: Result, tensors: Sequence[torch.Tensor]) -> None:
        """Send values that the client does not wait for. If there is no connection, it will ask again."""
        self._sent(sequence, message, tensors)

    def _sent(self, sequence: int, message: Result, tensors: Sequence[torch.Tensor]) -> _Line | None:
        """Send a message that is not sent again; return the connection if it took the message."""
        line = self._line
        if line is None or line.error is not None or self._is_over:
            return None
        try:
            with self._sending:
                line.channel.send(sequence, message, tensors)
        except TransportError as error:
            self._mute(line, error)
            return None
        return line

    def greeted(self) -> None:
        """Do nothing: every connection was greeted before it became part of the session."""

    def is_ready(self) -> bool:
        """Whether `receive` would start without waiting."""
        line = self._line
        return self._is_over or (line is not None and (line.pollable is None or line.pollable.is_ready()))

    def wait_with(self, descriptor: int) -> bool:
        """Wait until a descriptor is readable or `receive` would start without waiting.

        Returns:
            Whether `receive` would wait; ``False`` also if this connection cannot wait for both.
        """
        while True:
            line = self._line
            if line is None or line.wakeable is None or self.is_ready():
                return False
            if line.wakeable.wait_with(descriptor, TICK_S):
                return not self.is_ready()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        line = self._line
        return line is not None and (line.watched is None or not line.watched.is_gone())

    def is_gone(self) -> bool:
        """Whether no client will receive further messages, now or on another connection."""
        line = self._line
        if line is not None and (line.watched is None or not line.watched.is_gone()):
            return self._is_over
        if not self._end.lease_s or (line is not None and isinstance(line.channel, _Parting)
                                     and line.channel.has_left()):
            return True
        with self._changed:
            if line is self._line:
                self._end.lost(self._clock())
            return self._is_over or self._end.left_s(self._clock()) <= 0

    def take_up(self, channel: Channel, answered: int, welcome: Callable[[int], None], cancelled: int = 0) -> None:
        """Continue on another connection, and drop the previous one.

        Args:
            channel: The new connection, whose client has been admitted.
            answered: Number of the last answer that the client has.
            welcome: Answers the greeting; takes the number of the last batch received.
            cancelled: Batches up to this number are cancelled.

        Raises:
            RefusedError: The session is over.
            ProtocolError: The client reports an impossible number.
            TransportError: The connection broke, or a newer one has replaced it.
        """
        with self._changed:
            if self._is_over or self._is_ending or not self._end.lease_s:
                raise no_session()
            self._end.check(answered)
            self._cancel(cancelled)
            self._turns += 1
            turn, before = self._turns, self._line
            self._let_go()
            self._end.lost(self._clock())
            is_stopped = bool(self.stop)
        if is_stopped:
            self.stopped()
        if before is not None:
            before.channel.close()
        welcome(self._end.received)
        with self._changed:
            if self._is_over:
                raise no_session()
            if turn != self._turns:
                raise TransportError(f"The connection to {channel.peer} came too late: there is a newer one.")
            self._end.found(answered)
            self.peer, self._line = channel.peer, _Line.of(channel)
            if isinstance(channel, SupportsReceiveLimit):
                channel.admit_body = self._admit_body
            self._changed.notify_all()

    def finish(self) -> None:
        """End the session when all batches that have arrived were executed: no client resumes it."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def close(self, goodbye: Goodbye = _GOODBYE) -> None:
        """End the session, and notify the client unless it does not read. Never raises; may be called twice.

        Args:
            goodbye: The message for the client.
        """
        with self._changed:
            is_first, self._is_over = not self._is_over, True
            self.stop.append(OperationCancelledError("The operation was dropped: its session has ended."))
            line = self._line
            self._changed.notify_all()
        self.stopped()
        if line is None:
            return
        # A client that cannot resume needs no goodbye unless it gives a reason. Another thread may be sending at this
        # moment.
        if is_first and (self._end.lease_s or goodbye.code) and self._sending.acquire(timeout=REASON_S):
            with contextlib.suppress(DjinnError):  # the client will notice that the session is over
                line.channel.send(0, goodbye)
            self._sending.release()
        line.channel.close()

    def _cancel(self, number: int) -> None:
        """Cancel batches up to a number; the caller holds the lock."""
        if number > self._cancelled:
            self._cancelled = number
            if self._end.received <= number:
                self.stop.append(_interrupted())

    def _takes(self, line: _Line, number: int, digest: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Accept a received batch and check whether it is cancelled; return whether to execute it.

        A batch that arrives on a replaced connection is ignored. The client sends it again, because the welcome on the
        new connection did not acknowledge it.
        """
        with self._changed:
            if line is not self._line:
                return False
            is_cancelled = number <= self._cancelled
            if not self._end.take(number, digest, line.newly_heard(tensors), is_cancelled=is_cancelled):
                return False
            if not self._is_over:
                self.stop[:] = [_interrupted()] if is_cancelled else []
            return True

    def _connected(self) -> _Line:
        """Wait until there is a connection."""
        with self._changed:
            while not (self._is_over or self._is_ending) and self._line is None:
                left_s = self._end.left_s(self._clock())
                if left_s <= 0:
                    self._is_over = True
                    raise TransportError(f"{self.peer} has not connected again within {self._end.lease_s:g} s.")
                self._changed.wait(left_s)
            if self._line is None:
                raise TransportError(f"The session of {self.peer} was ended.")
            log.info("%s: the session goes on", self.peer)
            return self._line

    def _mute(self, line: _Line, error: TransportError) -> None:
        """Send nothing more on a connection. It is lost once all batches that have arrived on it are read."""
        if not self._end.lease_s:
            self._lose(line, error)
        line.error = line.error or error

    def _lose(self, line: _Line, error: TransportError) -> None:
        """Wait for another connection, unless there is one already."""
        self.settle()
        with self._changed:
            if self._is_over or self._is_ending or not self._end.lease_s:
                raise error
            if line is not self._line:
                return
            self._let_go()
            self._end.lost(self._clock())
        line.channel.close()
        log.info("%s: the connection is lost, the session stays for %g s: %s", self.peer, self._end.lease_s,
                 error.summary)

    def _let_go(self) -> None:
        self._past, self._line = (self.bytes_sent, self.bytes_received), None

    def _give(self, line: _Line, *, has_last: bool = False) -> None:
        """Send the answers that have not been sent on this connection yet.

        Args:
            line: The connection.
            has_last: Whether the last of them was sent on it before its batch arrived.
        """
        while line is self._line and line.error is None and (kept := self._end.to_give()) is not None:
            number, (message, tensors) = kept
            is_there = has_last and self._end.is_last_to_give
            if not is_there:
                with self._sending:
                    line.channel.send(number, message, tensors)
            with self._changed:
                # If the connection has been replaced, the answer is sent twice; the client recognizes the duplicate.
                if line is self._line:
                    (self._end.delivered_early if is_there else self._end.delivered)()

    def _tell(self, line: _Line) -> None:
        """Acknowledge the received batches."""
        number = self._end.acked()
        if self._end.lease_s and line.error is None:
            try:
                with self._sending:
                    line.channel.send(number, Ack())
            except TransportError as error:
                self._mute(line, error)


class ResumableSessions:
    """The sessions that can be resumed, by key.

    Args:
        prefix: Common beginning of their keys, so that a key identifies the process.

    Concurrency:
        Any thread.
    """

    def __init__(self, prefix: bytes = b"") -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._channels: dict[bytes, ResumableChannel] = {}

    def add(self, channel: ResumableChannel) -> bytes:
        """Create a session's secret key."""
        key = self._prefix + secrets.token_bytes(RESUME_BYTES - len(self._prefix))
        with self._lock:
            self._channels[digest_of(key)] = channel
        return key

    def remove(self, key: bytes) -> None:
        """Remove an ended session."""
        with self._lock:
            self._channels.pop(digest_of(key), None)

    def find(self, key: bytes) -> ResumableChannel:
        """Return the session with a key.

        Raises:
            RefusedError: There is none.
        """
        with self._lock:
            found = self._channels.get(digest_of(key))
        if found is None:
            raise no_session()
        return found


def _interrupted() -> OperationCancelledError:
    return OperationCancelledError("The operation was cancelled by an interrupt before it ran.",
                                   hint="Compute it again.")


def digest_of(key: bytes) -> bytes:
    """Digest a key. The time that a lookup by digest takes reveals nothing about the key."""
    return hashlib.sha256(key).digest()


def _nothing() -> None:
    pass
