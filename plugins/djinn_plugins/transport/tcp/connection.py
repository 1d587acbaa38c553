"""The client's end of a session, which may use several connections one after another."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import TypeVar

import attrs
import msgspec
import torch

from djinn.errors import DjinnError, ProtocolError, ProtocolVersionError, RefusedError, TokenEndedError, TransportError
from djinn.kinds.transport import ConnectOptions
from djinn.wire.messages import (
    PROTOCOL_VERSION,
    Ack,
    Batch,
    Goodbye,
    Hello,
    Message,
    PeerHello,
    Redirect,
    Result,
    Welcome,
)
from djinn_plugins.client.upload_dedup import after
from djinn_plugins.common.interrupts import acquired, deferral, sleep, through
from djinn_plugins.common.kinds.transport import LaterReply
from djinn_plugins.common.settings.connection import ResumeSettings
from djinn_plugins.transport.resumption import MAX_BUFFERED_BYTES, ClientEnd, Patience
from djinn_plugins.transport.tcp.answers import checked
from djinn_plugins.transport.tcp.copies import SentCopies
from djinn_plugins.transport.tcp.greeting import Wish, hello, welcomed
from djinn_plugins.transport.tcp.interrupted import is_interrupted, is_thrown_in, without_large
from djinn_plugins.transport.tcp.opening import reason_of
from djinn_plugins.transport.tcp.outbox import Outbox
from djinn_plugins.transport.tcp.reading import MessageReader
from djinn_plugins.transport.tcp.reasons import AGAIN, explained, unanswered
from djinn_plugins.transport.tcp.sockets import ByteStream, StalledError
from djinn_plugins.transport.tcp.stream import FrameStream, views_of
from djinn_plugins.transport.tcp.tls import TlsError
from djinn_plugins.transport.tcp.watching import watch

__all__ = ("SocketConnection",)

_log = logging.getLogger("djinn.transport")
T = TypeVar("T")

GOODBYE_S = 1.0
"""Time to send queued data when the session ends."""
MIN_SILENCE_S = 5.0
"""Minimum time that a server may be silent while a worker starts, even if the connect timeout leaves less."""
CANCEL_S = 0.8
"""How long to try to cancel while the caller waits. After that, the client cancels with the next reconnection."""
FLUSH_EVERY = 8
"""Operations of the first batch that is sent early, so that its execution overlaps with the recording of the next."""


class SocketConnection(MessageReader):
    """The client's end of a session; see `djinn.kinds.transport.Connection`.

    A frame is transferred completely, or the connection is closed. So after an exception that is not a
    `TransportError`, such as a `KeyboardInterrupt`, a connection that still works has accepted its batch. The answer to
    an interrupted request is read before the next frame is sent, and its failures are reported with the next answer. If
    interrupts are deferred (see `djinn_plugins.common.interrupts`) and the session can be resumed, the
    connection always still works, and the client asks the server to cancel the batches it has sent.

    `submit` blocks in two cases: while more than `MAX_QUEUED_BYTES` would be queued, and, for tensors of more than
    `MAX_BUFFERED_BYTES`, until they have arrived. Smaller tensors are copied, so that they can be sent again.

    Where the server lets it, the session outlives a connection that breaks; see `djinn_plugins.transport.resumption`.
    A thread notices at once if an idle connection breaks: the lease would end before the next operation comes.

    Attributes:
        address: Address of the server.
        welcome: The server's answer to the greeting.
        flush_every: Number of pending operations worth sending early: the server works while the client records.
        reconnections: Number of times that the session was resumed over a new connection.
        vouched_until_s: When the redirecting server's certificate expires, in seconds since 1970; ``None`` without one.
    """

    def __init__(self, address: str, frames: FrameStream, request_timeout_s: float | None = None) -> None:
        super().__init__(address, frames, Outbox(frames.stream))
        self.welcome = Welcome(PROTOCOL_VERSION, "", "", "", "", "")
        self.flush_every = FLUSH_EVERY
        self._request_timeout_s = request_timeout_s
        self.reconnections = 0
        self.vouched_until_s: float | None = None
        self._copies = SentCopies()
        self._end: ClientEnd[Sequence[memoryview]] = ClientEnd(0, 0)
        self._again: Callable[[ConnectOptions, Wish], SocketConnection] | None = None
        self._options, self._resuming = ConnectOptions(), ResumeSettings()
        self._sequence = 0
        self._is_between_frames = False
        self._owed = 0
        """Number of the last batch that needs an answer and has none yet; 0 for none."""
        self._cancelled = self._cancelled_there = 0
        """Batches up to these numbers are cancelled: on this side, and as far as the server knows."""
        self._settled = Result()
        self._lost = ""
        self._unsaid: BaseException | None = None
        self._in_use = threading.RLock()

    @property
    def certificate_expires_s(self) -> float | None:
        """When the server's certificate expires; see `djinn_plugins.common.kinds.transport.SupportsCertificate`."""
        return self.vouched_until_s or self._frames.stream.certificate_expires_s

    def take_up_again(
        self, again: Callable[[ConnectOptions, Wish], SocketConnection], options: ConnectOptions
    ) -> None:
        """Let the session resume over other connections when one breaks, if the server keeps it.

        Args:
            again: Connects and greets again, given the options and the session to resume.
            options: As for `djinn.kinds.transport.Transport.connect`.
        """
        self._resuming = options.settings(ResumeSettings)
        if self._resuming.resume and self.welcome.resume:
            self._again, self._options = again, options
            self._end = ClientEnd(self._sequence, self._resuming.resume_bytes, self._copies.release)
            self._early.accept(self.welcome.session, wanted=self._resuming.early_answers)
            watch(self)

    @property
    def watched_stream(self) -> ByteStream | None:
        """The stream to watch for a broken connection; ``None`` after the end of the session."""
        return None if self._lost or not self._frames.stream.is_ours else self._frames.stream

    def go_on_if_gone(self) -> None:
        """Reconnect if this connection broke while idle. The next use raises the error if that fails."""
        if not self._frames.stream.is_gone():
            return
        with self._in_use:
            try:
                while not self._lost and self._frames.stream.is_gone():
                    answered = self._heard()
                    if answered is not None:
                        self._settled = after(self._settled, answered[0])
            except Exception as error:  # noqa: BLE001  # as in `greet`
                self._unsaid = self._ended(error)

    def greet(
        self, token: str, deadline: float, owner: str = "", *, secret: str = "", ticket: str = "",
        wish: Wish | None = None,
    ) -> Redirect | None:
        """Send the greeting and wait for the answer.

        Args:
            token: The server's token, if it requires one.
            deadline: Time on the monotonic clock until which to wait.
            owner: The owner of the uploads; see `djinn.kinds.transport.ConnectOptions`.
            secret: The token, if it must not be sent again.
            ticket: The ticket to send instead.
            wish: Whether the session is to be resumable, and which session to resume.

        Returns:
            The redirect, if the server sent one.

        Raises:
            RefusedError, ProtocolVersionError: The server refuses.
            TransportError: The peer is not a server, or does not answer.
        """
        return self.introduce(hello(token, owner, secret, ticket, wish or Wish()), deadline)

    def introduce(self, greeting: Hello | PeerHello, deadline: float) -> Redirect | None:
        """Send a greeting and wait for the answer; see `greet`."""
        self._frames.stream.deadline = deadline
        silence_s = max(deadline - monotonic(), MIN_SILENCE_S)
        try:
            self._sequence = 1
            self._outbox.send(views_of(self._sequence, greeting, ()), waits=True)
            answer = welcomed(self.address, greeting, lambda: self._read()[1], self._frames.stream, silence_s)
        except BaseException as error:  # noqa: BLE001  # for any error, close the connection and release it
            is_late = isinstance(error, TimeoutError) and monotonic() >= self._frames.stream.deadline
            ended = self._ended(error)
            raise (unanswered(self.address, silence_s) if is_late else ended) from None
        self._frames.stream.deadline = None
        self._frames.stream.stall_timeout_s = self._request_timeout_s
        if isinstance(answer, Redirect):
            return answer
        self.welcome = answer
        return None

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that needs no answer; see `djinn.kinds.transport.Connection.submit`."""
        with self._used():
            if self._lost:
                raise self._closed()
            try:
                self._hand_over(batch, tensors, waits=False)
            except BaseException as error:  # noqa: BLE001  # as in `greet`
                raise self._ended(error, batch, tensors) from None

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer; see `djinn.kinds.transport.Connection.request`."""
        if not batch.wants_reply:
            batch = msgspec.structs.replace(batch, synchronize=True)
        with self._used():
            if self._lost:
                raise self._closed()
            try:
                self._hand_over(batch, tensors, waits=True)
                answered = checked(batch, self._awaited())
            except BaseException as error:  # noqa: BLE001  # as in `greet`
                raise self._ended(error, batch, tensors) from None
            settled, self._settled = self._settled, Result()
        return after(settled, answered[0]), answered[1]

    def later_values(self) -> list[LaterReply]:
        """Return arrived values; see `djinn_plugins.common.kinds.transport.SupportsLaterValues.later_values`."""
        with self._used():
            try:
                while self._later.is_waiting and not self._lost and self._frames.stream.is_ready():
                    answered = self._heard()
                    if answered is not None:
                        self._settled = after(self._settled, answered[0])
            except BaseException as error:  # noqa: BLE001  # as in `greet`
                raise self._ended(error, Batch()) from None
            return self._later.take()

    def cancel(self) -> None:
        """Cancel everything that was sent; see `djinn.kinds.transport.SupportsCancellation.cancel`."""
        with self._used():
            if not self._lost and self._again is not None and self._cancelled < self._sequence:
                self._cancel()

    def close(self) -> None:
        """End the session. Never raises; may be called twice, and from another thread."""
        is_free = self._frames.stream.is_ours and self._in_use.acquire(timeout=GOODBYE_S)
        try:
            if not self._lost and self._again is not None:
                if self._cancelled > self._cancelled_there:
                    self._cancel()
                self._say_goodbye(GOODBYE_S)
            self._lost = self._lost or "it was closed on this side"
            self._disconnect()
        finally:
            if is_free:
                self._in_use.release()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Exclude `go_on_if_gone`. Forked children skip the lock: their parent's thread may hold it."""
        if not self._frames.stream.is_ours:
            yield
            return
        interrupt = acquired(self._in_use, deferral())
        if interrupt is not None:
            # The caller's batch is not sent, so the sequence of batches has a gap.
            self._lost = "an interrupt came while it was being replaced"
            raise interrupt
        try:
            yield
        finally:
            self._in_use.release()

    def _blocking(self, action: Callable[[], T]) -> T:
        """Run a blocking action. An interrupt closes the connection if the session can be resumed over another one."""
        deferred = deferral()
        if deferred is None:
            return action()
        return deferred.through(action) if self._again is None else deferred.wait(self._shut, action)

    def _shut(self) -> None:
        self._frames.stream.close()
        self._outbox.close()

    def _hand_over(self, batch: Batch, tensors: Sequence[torch.Tensor], *, waits: bool) -> None:
        """Read the answers that no caller waits for, and send a batch.

        Reading first avoids a deadlock of two sides that both only send. If an interrupt arrives, the batch is kept and
        sent after reconnection, because later batches refer to its results.
        """
        if self._owed:
            try:
                last, _ = self._awaited()
                self._settled = after(self._settled, last)
            except BaseException:
                if self._again is not None and not self._lost and is_interrupted():
                    self._keep(batch, tensors, waits=waits)
                raise
        self._post(batch, tensors, waits=waits)

    def _awaited(self) -> tuple[Result, list[torch.Tensor]]:
        """Wait for the last outstanding answer, on this connection or the next."""
        while True:
            if (early := self._early.answer(self._owed, self._end)) is not None:
                self._owed = 0
                return early
            answered = self._heard()
            if answered is not None:
                if not self._owed:
                    return answered
                self._settled = after(self._settled, answered[0])

    def _heard(self) -> tuple[Result, list[torch.Tensor]] | None:
        """Wait for a message and read it; ``None`` if it is not an outstanding answer."""
        try:
            sequence, message, data = self._blocking(self._next)
        except DjinnError:
            raise
        except (OSError, EOFError) as error:
            self._go_on(error)
            self._is_between_frames = False
            return None
        if isinstance(message, Ack):
            self._end.acknowledged(sequence)
            return None
        if not isinstance(message, Result):
            raise ProtocolError(f"It answered a batch with a {type(message).__name__}.")
        if message.is_later:
            self._later.arrived(sequence, message, data)
            return None
        if message.assumes:
            self._early.arrived(sequence, message, data, self._end.answered)
            return None
        if self._again is None:
            if sequence != self._sequence:
                raise ProtocolError(f"It answered frame {sequence}, not {self._sequence}.")
        elif not self._end.answer(sequence):
            if self._early.is_repeated(sequence):
                self._settled = after(self._settled, message)
            return None
        if sequence >= self._owed:
            self._owed = 0
        return message, data

    def _next(self) -> tuple[int, Message, list[torch.Tensor]]:
        self._is_between_frames = True
        self._frames.stream.wait()
        self._is_between_frames = False
        return self._read()

    def _keep(
        self, batch: Batch, tensors: Sequence[torch.Tensor], *, waits: bool
    ) -> tuple[Sequence[memoryview], bool]:
        """Number a batch, and keep it until the server has it.

        Returns:
            The views to send, and whether they refer to the caller's tensors.
        """
        views = views_of(self._sequence + 1, batch, tensors)
        self._sequence += 1
        if batch.wants_reply:
            self._owed = self._sequence
        self._early.sent(self._sequence, batch, views[0])
        self._later.sent(self._sequence, batch)
        if self._again is None:
            return views, True
        size_bytes = len(views[0])
        is_borrowed = False
        if len(views) > 1:
            size_bytes = sum(map(len, views))
            is_borrowed = waits or size_bytes > MAX_BUFFERED_BYTES
            if not is_borrowed:
                views = [self._copies.copied(views, size_bytes)]
        self._end.send(views, size_bytes, is_borrowed=is_borrowed)
        return views, is_borrowed

    def _post(self, batch: Batch, tensors: Sequence[torch.Tensor], *, waits: bool) -> None:
        """Send a batch."""
        views, is_borrowed = self._keep(batch, tensors, waits=waits)
        try:
            self._blocking(lambda: self._outbox.send(views, waits=waits, is_kept=not is_borrowed))
        except OSError as error:
            if self._again is None:
                raise
            self._go_on(error)
        if self._again is None or waits:
            # A caller that waits reads everything up to its answer, which may be here already.
            return
        if is_borrowed:
            self._hear(lambda: self._end.acked < self._sequence)
        elif self._end.is_filling:
            self._hear(lambda: self._end.is_full or self._frames.stream.is_ready())

    def _hear(self, is_wanted: Callable[[], bool]) -> None:
        """Read the server's acknowledgements while the condition holds."""
        while is_wanted():
            if self._heard() is not None:
                raise ProtocolError("It answered a batch that asked for nothing.")

    def _go_on(self, error: OSError | EOFError) -> None:
        """Continue the session over another connection. On return, all messages that the server lacks were sent again.

        Raises:
            OSError, EOFError: The session cannot be resumed; the given error.
            TransportError: The session is lost.
        """
        stream = self._frames.stream
        if self._again is None or self._lost or isinstance(error, StalledError) or not stream.is_ours:
            raise error
        if isinstance(error, OSError):
            error = self._outbox.error if isinstance(self._outbox.error, OSError) else error
            words = self._last_words()
            if words is not None:
                raise words
        self._leave()
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        _log.warning("the connection to %s broke (%s): going on over another one", self.address, reason)
        began = monotonic()
        lacking = self._reconnect(reason, began)
        self.reconnections += 1
        _log.warning("going on at %s after %.2f s; %d messages sent again", self.address, monotonic() - began,
                     len(lacking))

    def _reconnect(self, reason: str, began: float) -> Sequence[Sequence[memoryview]]:
        patience = Patience(began, min(self._resuming.resume_timeout_s, self.welcome.lease_s))
        while True:
            is_refused = False
            attempt_s = patience.attempt_s(monotonic())
            try:
                if attempt_s > 0:
                    return self._adopt(attempt_s)
            except TokenEndedError:
                raise
            except (RefusedError, ProtocolVersionError, ProtocolError) as error:
                raise self._gone(reason, error.summary) from None
            except TransportError as error:
                is_refused = isinstance(error.__context__, ConnectionRefusedError | FileNotFoundError)
            except (OSError, EOFError) as error:
                # The new connection broke as well.
                self._leave()
                _log.info("%s: again: %s", self.address, error)
            pause_s = patience.pause_s(monotonic(), is_refused=is_refused)
            if pause_s is None:
                raise self._gone(reason, "nobody listens there any more." if is_refused else
                                 "no connection came about in time.")
            sleep(pause_s)
            if self._lost:
                raise self._closed()

    def _adopt(self, attempt_s: float, *, is_cancelling: bool = False) -> Sequence[Sequence[memoryview]]:
        """Reconnect, switch to the new connection, and send the messages that the server lacks."""
        if self._again is None:
            raise ProtocolError("This session cannot be taken up again.")
        again = self._again
        options = attrs.evolve(self._options, connect_timeout_s=min(attempt_s, self._options.connect_timeout_s))
        wish = Wish(self._resuming.resume, self.welcome.resume, self._end.answered,
                    self._cancelled if self._cancelled > self._cancelled_there else 0)
        other = again(options, wish) if is_cancelling else through(lambda: again(options, wish))
        self._cancelled_there = self._cancelled
        try:
            lacking = self._end.lacking(other.welcome.received)
            self._later.lost(other.welcome.received)
        except ProtocolError:
            other.close()
            raise
        self._frames, self._outbox = other._frames, other._outbox
        if self._lost:
            self._disconnect()
            raise self._closed()
        for views in lacking:
            self._outbox.send(views, waits=False)
        return lacking

    def _cancel(self) -> None:
        """Cancel all batches that were sent, over a new connection.

        If that fails now, the client cancels when it resumes the session: at once if possible, or with the next use.
        """
        self._cancelled = self._sequence
        self._leave()
        try:
            self._adopt(CANCEL_S, is_cancelling=True)
        except (DjinnError, OSError, EOFError) as error:
            self._leave()
            _log.warning("%s has not been told yet to cancel: %s", self.address, error)

    def _leave(self) -> None:
        """Release a broken connection. May be called twice."""
        if self._left is not self._frames:
            self._past_bytes, self._left = (self.bytes_sent, self.bytes_received), self._frames
        self._disconnect()

    def _gone(self, reason: str, why: str) -> TransportError:
        return TransportError(f"The connection to {self.address} broke ({reason}), and its session could not be taken "
                              f"up again: {why}", hint=AGAIN)

    def _say_goodbye(self, drain_s: float = 0.0) -> None:
        """Inform the server that the session is over; if the message is lost, the server's lease ends the session."""
        if not self._frames.stream.is_ours:
            return
        self._outbox.drain(drain_s)
        if not self._outbox.queued_bytes:
            with contextlib.suppress(OSError):  # it is broken or blocked: the lease ends the session as well
                self._frames.stream.send_ready(views_of(0, Goodbye(), ()))

    def _disconnect(self) -> None:
        self._frames.close()
        self._outbox.close()

    def _closed(self) -> BaseException:
        unsaid, self._unsaid = self._unsaid, None
        return unsaid or TransportError(f"The connection to {self.address} is closed: {self._lost}.", hint=AGAIN)

    def _ended(
        self, error: BaseException, batch: Batch | None = None, tensors: Sequence[torch.Tensor] = ()
    ) -> BaseException:
        """Close the connection, unless the error is an interrupt between two frames, which does no harm.

        Args:
            error: The error that ended the transfer.
            batch: The batch that was to be sent, if it may be sent again.
            tensors: Its tensors, which are the caller's again when this returns.
        """
        is_between_frames, self._is_between_frames = self._is_between_frames, False
        if batch is not None and self._again is not None and not self._lost and (
                is_interrupted(error) or is_thrown_in(error)):
            views = views_of(self._sequence, *without_large(batch, tensors))
            size_bytes = sum(map(len, views))
            self._end.replace_borrowed([self._copies.copied(views, size_bytes)], size_bytes)
            self._cancel()
            return error
        self._end.give_back()
        if isinstance(error, Exception):
            if isinstance(error, StalledError) and is_between_frames and self._again is not None:
                self._say_goodbye()
            return self._lose(error)
        if not is_between_frames or self._frames.stream.is_torn:
            self._lost = "an exception interrupted a transfer"
            self._disconnect()
        return error

    def _lose(self, error: Exception) -> Exception:
        """Close the connection, and return the error to raise, in the server's words if it sent any."""
        self._lost = "it broke"
        if self._outbox.error is not None and not isinstance(error, DjinnError):
            error = self._outbox.error
        is_broken = isinstance(error, OSError) and not isinstance(error, DjinnError | TimeoutError | TlsError)
        failure = (self._last_words() if is_broken else None) or explained(self.address, error)
        self._lost = failure.summary.rstrip(".") if isinstance(failure, DjinnError) else repr(failure)
        self._disconnect()
        return failure
