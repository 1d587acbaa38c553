"""Resumption: a session outlives the connection that it began on. Both ends, without I/O.

Batches are numbered consecutively. The client keeps each batch until the server acknowledges it. The server keeps an
answer until the client's next batch arrives; that batch acknowledges the answer, because a client sends no batch before
it has received the previous answer. After a connection breaks, each side states on the next connection which numbers it
has received, and the other side sends the rest again. Duplicates are recognized by their number.

Times are readings of a monotonic clock that the caller supplies, in seconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from djinn.errors import ProtocolError, RefusedError

__all__ = ("ATTEMPT_S", "MAX_BUFFERED_BYTES", "ClientEnd", "Patience", "ServerEnd", "no_session")

FrameT = TypeVar("FrameT")
AnswerT = TypeVar("AnswerT")

MAX_DIGESTS = 1024
"""Batches whose digest is remembered, to distinguish a repeated batch from a different one with the same number."""
ACK_BATCHES = 128
ACK_BYTES = 2**20
"""The server acknowledges after this many batches or bytes, if no answer has acknowledged them, and while more batches
are there to be read after more of them: the system drops the unsent data of a client that has died when it gets any."""
LATEST_ACK_BATCHES = 2**15
MAX_BUFFERED_BYTES = 2**20
"""Neither side keeps a batch larger than this: the server acknowledges it at once, and the client waits for that."""
_random = random.SystemRandom()
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
ATTEMPT_S = 2.0
"""How long the first attempt to reconnect may take; each further attempt may take twice as long as the one before."""
NOBODY_S = 1.0
"""How long to retry while the connection is refused: a server that has exited has lost its sessions."""


class ClientEnd(Generic[FrameT]):
    """The client's state of a session, independent of the connection.

    Args:
        first: Number of the last frame sent before the first batch: the greeting.
        limit_bytes: How much should be kept; `is_full` says when it is more.
        release: Called with each copy that need not be kept any more.

    Attributes:
        sent: Number of the last batch.
        answered: Number of the last batch whose answer has arrived; initially ``first``.
        acked: The server has acknowledged everything up to this number.
        kept_bytes: Bytes of all kept batches.
        copied_bytes: Bytes of the kept batches that are not borrowed.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, first: int, limit_bytes: int, release: Callable[[FrameT], None] | None = None) -> None:
        self.sent = self.answered = self.acked = first
        self.kept_bytes = 0
        self.copied_bytes = 0
        # The server may have received this much without having acknowledged it yet.
        self._limit_bytes = max(limit_bytes, 4 * ACK_BYTES)
        self._release = release
        self._kept: deque[tuple[int, FrameT | None, int, bool]] = deque()
        """Number, frame (``None`` if it cannot be sent again), length, and whether it is borrowed."""

    @property
    def is_full(self) -> bool:
        """Whether to wait for an acknowledgement."""
        return self.copied_bytes > self._limit_bytes

    @property
    def is_filling(self) -> bool:
        """Whether to check for acknowledgements that have arrived."""
        return self.copied_bytes > 2 * ACK_BYTES or len(self._kept) > 2 * ACK_BATCHES

    @property
    def kept(self) -> int:
        """How many batches are kept."""
        return len(self._kept)

    def send(self, frame: FrameT, size_bytes: int, *, is_borrowed: bool = False) -> int:
        """Record a batch that is about to be sent, and return its number.

        Args:
            frame: The frame to send.
            size_bytes: Its length.
            is_borrowed: Whether its bytes belong to the caller, who waits until they are no longer needed.
        """
        self.sent += 1
        self._kept.append((self.sent, frame, size_bytes, is_borrowed))
        self.kept_bytes += size_bytes
        if not is_borrowed:
            self.copied_bytes += size_bytes
        return self.sent

    def acknowledged(self, number: int) -> None:
        """Process the acknowledgement of everything up to a number.

        Raises:
            ProtocolError: No batch with that number was sent.
        """
        if number > self.sent:
            raise ProtocolError(f"It says that it has batch {number}; {self.sent} is the last that was sent.")
        kept = self._kept
        while kept and kept[0][0] <= number:
            _, frame, size_bytes, is_borrowed = kept.popleft()
            self.kept_bytes -= size_bytes
            if not is_borrowed:
                self.copied_bytes -= size_bytes
                if self._release is not None and frame is not None:
                    self._release(frame)
        self.acked = max(self.acked, number)

    def answer(self, number: int) -> bool:
        """Process the answer to a batch; return whether it is the first copy of that answer.

        Raises:
            ProtocolError: No such batch was sent.
        """
        self.acknowledged(number)
        is_new = number > self.answered
        self.answered = max(self.answered, number)
        return is_new

    def answered_early(self, number: int) -> None:
        """Note that a batch was answered before the server acknowledged it, so the batch is still kept."""
        self.answered = max(self.answered, number)

    def give_back(self) -> None:
        """Return borrowed bytes to the caller, who stops waiting; those batches cannot be sent again."""
        for index, (number, _, size_bytes, is_borrowed) in enumerate(self._kept):
            if is_borrowed:
                self._kept[index] = number, None, size_bytes, True

    def replace_borrowed(self, frame: FrameT, size_bytes: int) -> None:
        """Replace the bytes borrowed for the last batch by a copy, because the caller stops waiting.

        Args:
            frame: The frame to send again if the server lacks the batch.
            size_bytes: Its length.
        """
        if self._kept and self._kept[-1][3]:
            number, _, before_bytes, _ = self._kept.pop()
            self._kept.append((number, frame, size_bytes, False))
            self.kept_bytes += size_bytes - before_bytes
            self.copied_bytes += size_bytes

    def lacking(self, received: int) -> list[FrameT]:
        """Return the batches that the server lacks, given the last number that it reports on a new connection.

        Raises:
            ProtocolError: The number is impossible or has gone backwards; or a batch that the server lacks is no longer
                available.
        """
        if not self.acked <= received <= self.sent:
            raise ProtocolError(
                f"It says that it has batch {received}; it had {self.acked}, and {self.sent} were sent.")
        self.acknowledged(received)
        frames = [frame for _, frame, _, _ in self._kept if frame is not None]
        if len(frames) < len(self._kept):
            raise ProtocolError("What an interrupted request has sent cannot be sent again.")
        return frames


class ServerEnd(Generic[AnswerT]):
    """The server's state of a session, apart from its values and the connection.

    Args:
        first: Number of the greeting.
        lease_s: How long the session is kept without a connection.

    Attributes:
        received: Number of the last batch received.
        lease_s: As given.
        ack_due: Whether an acknowledgement is due.
        may_wait: Whether it may wait until no more batches are there to be read.
        promised: Number of the last batch that was answered early, whether or not it was received.

    Concurrency:
        One thread at a time, but any thread may read `received`.
    """

    def __init__(self, first: int, lease_s: float) -> None:
        self.received = self.promised = first
        self.lease_s = lease_s
        self._settled = first
        self._digests: deque[int] = deque(maxlen=MAX_DIGESTS)
        self._answers: deque[tuple[int, AnswerT]] = deque()
        """Those that the client may lack, oldest first: one, or several after interrupts."""
        self._given = 0
        self.ack_due = self.may_wait = False
        self._unacked = self._unacked_bytes = 0
        self._lost_at: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether there is no connection."""
        return self._lost_at is not None

    @property
    def holds_answer(self) -> bool:
        """Whether there is an answer that the client may lack."""
        return bool(self._answers)

    @property
    def is_given(self) -> bool:
        """Whether all kept answers have been sent on this connection."""
        return self._given == len(self._answers)

    def take(self, number: int, digest: int, size_bytes: int = 0, *, is_cancelled: bool = False) -> bool:
        """Record a received batch; return whether to execute it.

        Args:
            number: Its number.
            digest: Distinguishes its content from other content.
            size_bytes: How many bytes were received with it.
            is_cancelled: The client was interrupted before it could send the batch, so it may lack the answers to
                earlier ones.

        Returns:
            ``False`` for a duplicate: it was executed, or is being executed.

        Raises:
            ProtocolError: The batch before it is missing, or a different batch with the same number was received.
        """
        if number <= self.received:
            behind = self.received - number
            if behind < len(self._digests) and self._digests[-1 - behind] != digest:
                raise ProtocolError(f"Batch {number} comes again, and is another.")
            if len(self._digests) <= behind < MAX_DIGESTS and len(self._digests) < MAX_DIGESTS:
                raise ProtocolError(f"Batch {number} has a number of before the first batch.")
            # The client has missed an acknowledgement: acknowledge again.
            self.ack_due, self.may_wait = True, False
            return False
        if number != self.received + 1:
            raise ProtocolError(f"Batch {number} follows batch {self.received}.")
        self.received = number
        self._digests.append(digest)
        if self._answers and not is_cancelled:
            # A client that sends a batch has received the previous answer.
            self._settle(self._answers[-1][0])
        self._unacked += 1
        self._unacked_bytes += size_bytes
        self.ack_due = (self._unacked >= ACK_BATCHES or self._unacked_bytes >= ACK_BYTES
                        or size_bytes > MAX_BUFFERED_BYTES)
        self.may_wait = self._unacked < LATEST_ACK_BATCHES and self._unacked_bytes < ACK_BYTES
        return True

    def finish(self, number: int, answer: AnswerT) -> None:
        """Keep the answer to the last executed batch."""
        self._answers.append((number, answer))

    @property
    def is_last_to_give(self) -> bool:
        """Whether all kept answers but one have been sent on this connection."""
        return self._given == len(self._answers) - 1

    def to_give(self) -> tuple[int, AnswerT] | None:
        """Return the first kept answer that has not been sent on this connection, and its number."""
        return None if self.is_given else self._answers[self._given]

    def delivered(self) -> None:
        """Record that the next answer is being sent on this connection."""
        self._given += 1
        self.acked()

    def delivered_early(self) -> None:
        """Record that the next answer was sent on this connection before its batch arrived: it acknowledges nothing."""
        self._given += 1

    def acked(self) -> int:
        """Record that an acknowledgement is being sent; return the number to acknowledge."""
        self._unacked = self._unacked_bytes = 0
        self.ack_due = False
        return self.received

    def lost(self, now: float) -> None:
        """Record that the connection has broken; the last frames sent on it may not have arrived."""
        if self._lost_at is None:
            self._lost_at = now
        self._given = 0

    def left_s(self, now: float) -> float:
        """Return how long the session will still be kept; infinite while there is a connection."""
        return float("inf") if self._lost_at is None else self._lost_at + self.lease_s - now

    def check(self, answered: int) -> None:
        """Check that a client that has all answers up to a number can resume.

        Raises:
            ProtocolError: The number is impossible or has gone backwards.
        """
        if not self._settled <= answered <= max(self.received, self.promised):
            raise ProtocolError(f"It says that it has answer {answered}; it had {self._settled}, and {self.received} "
                                "batches have come.")

    def found(self, answered: int) -> None:
        """Record a new connection, whose client has all answers up to a number.

        Raises:
            ProtocolError: As for `check`.
        """
        self.check(answered)
        self._settle(answered)
        # The welcome has acknowledged the batches.
        self.acked()
        self._lost_at = None

    def _settle(self, answered: int) -> None:
        """Drop the answers that the client has; the others are to be given on this connection."""
        while self._answers and self._answers[0][0] <= answered:
            self._settled = self._answers.popleft()[0]
        self._given = 0


class Patience:
    """Decides when to reconnect, and how long an attempt may take.

    Args:
        lost_at: When the connection broke.
        lease_s: How long the server keeps the session.
        scatter: Returns numbers from 0 to 1, so that many clients do not reconnect at the same moment.
    """

    def __init__(
        self, lost_at: float, lease_s: float, scatter: Callable[[], float] = _random.random
    ) -> None:
        self._until = lost_at + lease_s
        self._scatter = scatter
        self._pause_s = FIRST_PAUSE_S
        self._attempt_s = ATTEMPT_S
        self._nobody_since: float | None = None

    def attempt_s(self, now: float) -> float:
        """Return how long the next attempt may take; 0 or less if it is too late for another."""
        allowed_s = min(self._attempt_s, self._until - now)
        self._attempt_s *= 2
        return allowed_s

    def pause_s(self, now: float, *, is_refused: bool = False) -> float | None:
        """Return how long to wait after a failed attempt, or ``None`` to give up.

        Args:
            now: The current time.
            is_refused: Whether the machine refused the connection because no process listens there.
        """
        self._nobody_since = (now if self._nobody_since is None else self._nobody_since) if is_refused else None
        left_s = self._until - now
        if left_s <= 0 or (self._nobody_since is not None and now - self._nobody_since >= NOBODY_S):
            return None
        pause_s = self._pause_s * (0.5 + 0.5 * self._scatter())
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return min(pause_s, left_s)


def no_session() -> RefusedError:
    """Make the error for a session that cannot be resumed, so that every caller words it the same."""
    return RefusedError("There is no such session here, or not any more.",
                        hint="Its worker may have died, or its lease may be over; call djinn.init() to start another.")
