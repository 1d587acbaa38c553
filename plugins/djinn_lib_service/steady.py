"""The server's end of a session that may change its connection: a channel that outlives channels."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch

from djinn.errors import DjinnError, OperationCancelledError, TransportError
from djinn.kinds.transport import BoundedChannel, Channel, CountedChannel, DigestingChannel
from djinn.wire.messages import RESUME_BYTES, Batch, Goodbye, Message, Result, Taken
from djinn_lib_service.resumption import ServerEnd, no_session

__all__ = ("Resumable", "SteadyChannel", "digest_of")

log = logging.getLogger("djinn.server")
_GOODBYE = Goodbye()
REASON_S = 0.5
"""How long an answer that is being sent may keep the reason why the session ends from being sent."""


@runtime_checkable
class _Pollable(Channel, Protocol):
    """What a channel may have beside the methods of `djinn.kinds.transport.Channel`."""

    def is_ready(self) -> bool:
        """Whether `receive` would not wait."""


@runtime_checkable
class _Watched(Channel, Protocol):
    """What a channel may have beside the methods of `djinn.kinds.transport.Channel`."""

    def is_gone(self) -> bool:
        """Whether the other side sends nothing more, whatever it has sent before."""


@runtime_checkable
class _Parting(Channel, Protocol):
    """What a channel may have beside the methods of `djinn.kinds.transport.Channel`."""

    def has_left(self) -> bool:
        """Whether the other side has said goodbye, before what it said before has been received."""


@attrs.define(eq=False)
class _Line:
    """One of a session's connections, and what it can do; to ask a class each time would take longer than doing it.

    Attributes:
        heard_bytes: What it had received when the last batch came.
    """

    channel: Channel
    digesting: DigestingChannel | None
    counted: CountedChannel | None
    pollable: _Pollable | None
    watched: _Watched | None
    heard_bytes: int = 0

    @classmethod
    def of(cls, channel: Channel) -> _Line:
        """Look what a connection can do."""
        return cls(channel, channel if isinstance(channel, DigestingChannel) else None,
                   channel if isinstance(channel, CountedChannel) else None,
                   channel if isinstance(channel, _Pollable) else None,
                   channel if isinstance(channel, _Watched) else None)

    def newly_heard(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return how much has come since the last batch, but for what was read ahead of it, or was of this one."""
        body_bytes = sum([tensor.nbytes for tensor in tensors]) if tensors else 0
        if self.counted is None:
            return body_bytes
        before, self.heard_bytes = self.heard_bytes, self.counted.bytes_received
        return max(self.heard_bytes - before, body_bytes)


class SteadyChannel:
    """A session's channel, whichever connection it is on; see `djinn.kinds.transport.Channel`.

    Batches come one after the other and none twice; an answer is sent again on a new connection if the client lacks it.

    Args:
        channel: The first connection, whose greeting was answered.
        first: Number of the greeting.
        lease_s: How long to wait for another connection; 0: the session ends with this one.
        clock: Tells the time.

    Attributes:
        peer: Who is at the other end now.
        settle: Called when what came over a connection is of no use any more: it broke, or the batch came before.
        stop: Empty as long as what the last batch computes is wanted, else why not; see
            `djinn_lib_service.service.SessionService.handle`.
        stopped: Called when ``stop`` has been filled, by the thread that did.

    Concurrency:
        One thread receives and sends. Any calls `take_up`, `is_gone` and `close`.

    Laws:
        transport.exactly_once, transport.resumed
    """

    def __init__(self, channel: Channel, first: int, lease_s: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
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
        self._turns = 0
        self._past = (0, 0)
        self._admit_body: Callable[[int], None] | None = None

    @property
    def lease_s(self) -> float:
        """How long the session waits for another connection."""
        return self._end.lease_s

    @property
    def admit_body(self) -> Callable[[int], None] | None:
        """What is asked before a body is read; see `djinn.kinds.transport.BoundedChannel`."""
        return self._admit_body

    @admit_body.setter
    def admit_body(self, admit: Callable[[int], None] | None) -> None:
        self._admit_body = admit
        if self._line is not None and isinstance(self._line.channel, BoundedChannel):
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
            Its number, itself, its tensors; ``None`` when the client has ended the session.

        Raises:
            ProtocolError: What came is no batch, or not the next one.
            TransportError: The connection broke, and nobody took the session up again in time.
        """
        while True:
            line = self._line or self._connected()
            try:
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
            if self._end.is_to_tell:
                self._tell(line)
            if is_new:
                return received
            del received, message, tensors
            self.settle()

    def send(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send an answer, now or on the next connection; anything else, now.

        Raises:
            TransportError: There is no connection, and no other may come.
        """
        line = self._line
        if isinstance(message, Result):
            if self._is_over:
                # What it says of programs that were dropped is not why: the client hears that from `close`.
                return
            self._end.finish(sequence, (message, tensors))
            if line is not None:
                try:
                    self._give(line)
                except TransportError as error:
                    self._lose(line, error)
            return
        if line is None:
            raise TransportError(f"There is no connection to {self.peer}.")
        with self._sending:
            line.channel.send(sequence, message, tensors)

    def greeted(self) -> None:
        """Nothing: every connection was greeted before it came here."""

    def is_ready(self) -> bool:
        """Whether `receive` would not wait for something to begin."""
        line = self._line
        return self._is_over or (line is not None and (line.pollable is None or line.pollable.is_ready()))

    def is_gone(self) -> bool:
        """Whether nobody will receive what is sent, now or on another connection."""
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
        """Go on with another connection, and let go of the one before.

        Args:
            channel: The new one, whose client may come in.
            answered: Number of the last answer that the client has.
            welcome: Answers the greeting; is given the number of the last batch that has come.
            cancelled: What batches up to this number compute is not wanted any more.

        Raises:
            RefusedError: The session is over.
            ProtocolError: The client says what cannot be.
            TransportError: The connection broke, or a newer one was faster.
        """
        with self._changed:
            if self._is_over or not self._end.lease_s:
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
        welcome(self._end.taken)
        with self._changed:
            if self._is_over:
                raise no_session()
            if turn != self._turns:
                raise TransportError(f"The connection to {channel.peer} came too late: there is a newer one.")
            self._end.found(answered)
            self.peer, self._line = channel.peer, _Line.of(channel)
            if isinstance(channel, BoundedChannel):
                channel.admit_body = self._admit_body
            self._changed.notify_all()

    def close(self, goodbye: Goodbye = _GOODBYE) -> None:
        """End the session, and tell the client unless it reads nothing. Never raises, may be called twice.

        Args:
            goodbye: What the client hears.
        """
        with self._changed:
            is_first, self._is_over = not self._is_over, True
            self.stop.append(OperationCancelledError("The operation was dropped: its session has ended."))
            line = self._line
            self._changed.notify_all()
        self.stopped()
        if line is None:
            return
        # A client that does not take up sessions expects none, but for a reason. Another thread may have just sent.
        if is_first and (self._end.lease_s or goodbye.code) and self._sending.acquire(timeout=REASON_S):
            with contextlib.suppress(DjinnError):  # it learns by itself that there is no session any more
                line.channel.send(0, goodbye)
            self._sending.release()
        line.channel.close()

    def _cancel(self, number: int) -> None:
        """Learn which batches are not wanted any more; the caller holds the lock."""
        if number > self._cancelled:
            self._cancelled = number
            if self._end.taken <= number:
                self.stop.append(_interrupted())

    def _takes(self, line: _Line, number: int, digest: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Take in a batch that has come, and see if what it computes is wanted; whether it is to be carried out.

        What comes over a connection after another has taken its place comes again: the client was told that it has not.
        """
        with self._changed:
            if line is not self._line:
                return False
            if not self._end.take(number, digest, line.newly_heard(tensors)):
                return False
            if not self._is_over:
                self.stop[:] = [_interrupted()] if number <= self._cancelled else []
            return True

    def _connected(self) -> _Line:
        """Wait until there is a connection."""
        with self._changed:
            while not self._is_over and self._line is None:
                left_s = self._end.left_s(self._clock())
                if left_s <= 0:
                    self._is_over = True
                    raise TransportError(f"{self.peer} has not connected again within {self._end.lease_s:g} s.")
                self._changed.wait(left_s)
            if self._line is None:
                raise TransportError(f"The session of {self.peer} was ended.")
            log.info("%s: the session goes on", self.peer)
            return self._line

    def _lose(self, line: _Line, error: TransportError) -> None:
        """Wait for another connection from now on; unless there is one already."""
        self.settle()
        with self._changed:
            if self._is_over or not self._end.lease_s:
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

    def _give(self, line: _Line) -> None:
        """Send the answer that this connection has not carried yet."""
        kept = self._end.to_give()
        if kept is not None:
            number, (message, tensors) = kept
            with self._sending:
                line.channel.send(number, message, tensors)
            if line is self._line:
                # If another takes its place in this moment, that one is told twice, which its client notices.
                self._end.given()

    def _tell(self, line: _Line) -> None:
        """Tell the client what has come."""
        number = self._end.told()
        if self._end.lease_s:
            try:
                with self._sending:
                    line.channel.send(number, Taken())
            except TransportError as error:
                self._lose(line, error)


class Resumable:
    """The sessions that may be taken up again, by their keys.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[bytes, SteadyChannel] = {}

    def add(self, channel: SteadyChannel) -> bytes:
        """Give a session a key, which is a secret."""
        key = secrets.token_bytes(RESUME_BYTES)
        with self._lock:
            self._channels[digest_of(key)] = channel
        return key

    def remove(self, key: bytes) -> None:
        """A session is over."""
        with self._lock:
            self._channels.pop(digest_of(key), None)

    def find(self, key: bytes) -> SteadyChannel:
        """Return the session of a key.

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
    """Digest a key. How long it takes to look that up says nothing about the key."""
    return hashlib.sha256(key).digest()


def _nothing() -> None:
    pass
