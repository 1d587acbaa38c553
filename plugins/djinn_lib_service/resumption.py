"""Resumption: a session outlives the connection that it began on. Both ends, without input and output.

Batches are numbered one after the other. The client's end keeps what it has sent until it learns that the server has
it, and the server's end keeps an answer until the client shows that it has it, which its next batch does: a client
sends none before it has received the answer to the one before. When a connection breaks, each tells the other on the
next one how far it has come, and both send again what the other lacks. What comes twice is known by its number.

Times are readings of a monotonic clock that the caller gives, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from djinn.errors import ProtocolError, RefusedError

__all__ = ("ALONE_BYTES", "ATTEMPT_S", "ClientEnd", "Patience", "ServerEnd", "no_session")

FrameT = TypeVar("FrameT")
AnswerT = TypeVar("AnswerT")

MAX_DIGESTS = 1024
"""Batches whose content is remembered, to tell the same one from another under its number."""
TOLD_BATCHES = 128
TOLD_BYTES = 2**20
"""So much may come before the client is told that it has come, if no answer tells it so."""
ALONE_BYTES = 2**20
"""A batch of more than this is kept by nobody: the client waits until it is told that it has come, which is at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
ATTEMPT_S = 2.0
"""How long the first attempt to connect again may take; each may take twice as long as the one before."""
NOBODY_S = 1.0
"""How long to try again while nobody listens: a server that has gone takes its sessions with it."""


class ClientEnd(Generic[FrameT]):
    """What a client remembers of a session, beside the connection.

    Args:
        first: Number of the last thing sent before the first batch: the greeting.
        limit_bytes: How much should be kept; `is_full` says that it is more.
        release: Told of each copy that need not be kept any more.

    Attributes:
        sent: Number of the last batch.
        answered: Number of the last batch whose answer has come; at first, ``first``.
        taken: The other side has everything up to here.
        kept_bytes: Length of what is kept.
        copied_bytes: Length of that part of it which is not borrowed.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, first: int, limit_bytes: int, release: Callable[[FrameT], None] | None = None) -> None:
        self.sent = self.answered = self.taken = first
        self.kept_bytes = 0
        self.copied_bytes = 0
        # The other side keeps to itself that so much has come.
        self._limit_bytes = max(limit_bytes, 4 * TOLD_BYTES)
        self._release = release
        self._kept: deque[tuple[int, FrameT | None, int, bool]] = deque()
        """Number, what was sent (``None`` if that is nobody's to send again), length, and whether it is borrowed."""

    @property
    def is_full(self) -> bool:
        """Whether to wait until the other side says what it has."""
        return self.copied_bytes > self._limit_bytes

    @property
    def is_filling(self) -> bool:
        """Whether to look what the other side has said by now."""
        return self.copied_bytes > 2 * TOLD_BYTES or len(self._kept) > 2 * TOLD_BATCHES

    @property
    def kept(self) -> int:
        """How many batches are kept."""
        return len(self._kept)

    def send(self, frame: FrameT, size_bytes: int, *, is_borrowed: bool = False) -> int:
        """Take in a batch that is about to be sent; return its number.

        Args:
            frame: What is sent.
            size_bytes: Its length.
            is_borrowed: Whether its bytes belong to the caller, for as long as the caller waits.
        """
        self.sent += 1
        self._kept.append((self.sent, frame, size_bytes, is_borrowed))
        self.kept_bytes += size_bytes
        if not is_borrowed:
            self.copied_bytes += size_bytes
        return self.sent

    def acknowledged(self, number: int) -> None:
        """Learn that the other side has everything up to a number.

        Raises:
            ProtocolError: That was never sent.
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
        self.taken = max(self.taken, number)

    def answer(self, number: int) -> bool:
        """Learn that the answer to a batch has come; whether it is the first time.

        Raises:
            ProtocolError: It is to none of the batches that were sent.
        """
        self.acknowledged(number)
        is_new = number > self.answered
        self.answered = max(self.answered, number)
        return is_new

    def give_back(self) -> None:
        """The caller does not wait any more: what is borrowed belongs to it again."""
        for index, (number, _, size_bytes, is_borrowed) in enumerate(self._kept):
            if is_borrowed:
                self._kept[index] = number, None, size_bytes, True

    def replace_borrowed(self, frame: FrameT, size_bytes: int) -> None:
        """The caller does not wait any more: something of this side takes the place of what it lent for the last batch.

        Args:
            frame: What is to be sent again instead, if the other side lacks the batch.
            size_bytes: Its length.
        """
        if self._kept and self._kept[-1][3]:
            number, _, before_bytes, _ = self._kept.pop()
            self._kept.append((number, frame, size_bytes, False))
            self.kept_bytes += size_bytes - before_bytes
            self.copied_bytes += size_bytes

    def lacking(self, taken: int) -> list[FrameT]:
        """Learn on a new connection how far the other side has come, and return what it lacks.

        Raises:
            ProtocolError: It cannot have come so far, or had come further; or what it lacks is not there any more.
        """
        if not self.taken <= taken <= self.sent:
            raise ProtocolError(f"It says that it has batch {taken}; it had {self.taken}, and {self.sent} were sent.")
        self.acknowledged(taken)
        frames = [frame for _, frame, _, _ in self._kept if frame is not None]
        if len(frames) < len(self._kept):
            raise ProtocolError("What an interrupted request has sent cannot be sent again.")
        return frames


class ServerEnd(Generic[AnswerT]):
    """What a server remembers of a session, beside its values and the connection.

    Args:
        first: Number of the greeting.
        lease_s: How long the session stays without a connection.

    Attributes:
        taken: Number of the last batch that has come.
        lease_s: As given.
        is_given: Whether this connection has carried the answer that is kept, if there is one.
        is_to_tell: Whether the client should be told by now what has come.

    Concurrency:
        One thread at a time, but `taken` may be read by any.
    """

    def __init__(self, first: int, lease_s: float) -> None:
        self.taken = first
        self.lease_s = lease_s
        self._settled = first
        self._digests: deque[int] = deque(maxlen=MAX_DIGESTS)
        self._answer: tuple[int, AnswerT] | None = None
        self.is_given = True
        self.is_to_tell = False
        self._untold = self._untold_bytes = 0
        self._lost_at: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether there is no connection."""
        return self._lost_at is not None

    @property
    def holds_answer(self) -> bool:
        """Whether there is an answer that the client may lack."""
        return self._answer is not None

    def take(self, number: int, digest: int, size_bytes: int = 0) -> bool:
        """Take in a batch that has come; whether it is to be carried out.

        Args:
            number: Its number.
            digest: Tells its content from others.
            size_bytes: How much has come with it.

        Returns:
            ``False`` if it came before: it was carried out, or is being carried out.

        Raises:
            ProtocolError: One before it has not come, or another came under its number.
        """
        if number <= self.taken:
            behind = self.taken - number
            if behind < len(self._digests) and self._digests[-1 - behind] != digest:
                raise ProtocolError(f"Batch {number} comes again, and is another.")
            if len(self._digests) <= behind < MAX_DIGESTS and len(self._digests) < MAX_DIGESTS:
                raise ProtocolError(f"Batch {number} has a number of before the first batch.")
            # The client was told otherwise, or what it was told was lost.
            self.is_to_tell = True
            return False
        if number != self.taken + 1:
            raise ProtocolError(f"Batch {number} follows batch {self.taken}.")
        self.taken = number
        self._digests.append(digest)
        if self._answer is not None:
            # Whoever sends a batch has received the answer to the one before.
            self._settled, self._answer = self._answer[0], None
        self._untold += 1
        self._untold_bytes += size_bytes
        self.is_to_tell = (self._untold >= TOLD_BATCHES or self._untold_bytes >= TOLD_BYTES
                           or size_bytes > ALONE_BYTES)
        return True

    def finish(self, number: int, answer: AnswerT) -> None:
        """Keep the answer to the batch that was carried out last."""
        self._answer, self.is_given = (number, answer), False

    def to_give(self) -> tuple[int, AnswerT] | None:
        """Return the answer that this connection has not carried yet, if there is one, and its number."""
        return None if self.is_given else self._answer

    def given(self) -> None:
        """The answer is on its way on this connection."""
        self.is_given = True
        self.told()

    def told(self) -> int:
        """The client is told what has come; return the number of the last."""
        self._untold = self._untold_bytes = 0
        self.is_to_tell = False
        return self.taken

    def lost(self, now: float) -> None:
        """The connection has broken; what it carried last may not have arrived."""
        if self._lost_at is None:
            self._lost_at = now
        self.is_given = self._answer is None

    def left_s(self, now: float) -> float:
        """Return how long the session still stays; infinite while there is a connection."""
        return float("inf") if self._lost_at is None else self._lost_at + self.lease_s - now

    def check(self, answered: int) -> None:
        """Make sure that a client which has all answers up to a number can go on.

        Raises:
            ProtocolError: It cannot have come so far, or had come further.
        """
        if not self._settled <= answered <= self.taken:
            raise ProtocolError(f"It says that it has answer {answered}; it had {self._settled}, and {self.taken} "
                                "batches have come.")

    def found(self, answered: int) -> None:
        """There is a connection again, whose client has all answers up to a number.

        Raises:
            ProtocolError: As for `check`.
        """
        self.check(answered)
        if self._answer is not None and answered >= self._answer[0]:
            self._settled, self._answer = self._answer[0], None
        self.is_given = self._answer is None
        # The welcome has said so.
        self.told()
        self._lost_at = None


class Patience:
    """When to try to connect again, and how long.

    Args:
        lost_at: When the connection broke.
        lease_s: How long the server keeps the session.
        scatter: Gives numbers from 0 to 1, so that many clients do not come at the same moment.
    """

    def __init__(self, lost_at: float, lease_s: float, scatter: Callable[[], float]) -> None:
        self._until = lost_at + lease_s
        self._scatter = scatter
        self._pause_s = FIRST_PAUSE_S
        self._attempt_s = ATTEMPT_S
        self._nobody_since: float | None = None

    def attempt_s(self, now: float) -> float:
        """Return how long the next attempt may take; 0 or less if it is too late for one."""
        allowed_s = min(self._attempt_s, self._until - now)
        self._attempt_s *= 2
        return allowed_s

    def pause_s(self, now: float, *, is_refused: bool = False) -> float | None:
        """Return how long to wait after an attempt has failed, or ``None`` if there is to be no other.

        Args:
            now: The time.
            is_refused: Whether nobody listens there, as the machine itself says.
        """
        self._nobody_since = (now if self._nobody_since is None else self._nobody_since) if is_refused else None
        left_s = self._until - now
        if left_s <= 0 or (self._nobody_since is not None and now - self._nobody_since >= NOBODY_S):
            return None
        pause_s = self._pause_s * (0.5 + 0.5 * self._scatter())
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return min(pause_s, left_s)


def no_session() -> RefusedError:
    """Say that a session cannot be taken up again, in the same words whoever finds out."""
    return RefusedError("There is no such session here, or not any more.",
                        hint="Its worker may have died, or its lease may be over; call djinn.init() to start another.")
