"""Records the token that admitted each session, so that the session ends with the token."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from time import monotonic

from djinn.errors import DjinnError, TokenEndedError
from djinn.wire.messages import Goodbye
from djinn_plugins.common.kinds.transport import Channel
from djinn_plugins.server.tickets import VALID_S
from djinn_plugins.transport.resumable_channel import ResumableChannel

__all__ = ("Grants",)


class Grants:
    """Maps connections and sessions to the identities of their tokens.

    Args:
        clock: Returns the time.

    Concurrency:
        Any thread.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._admitted: weakref.WeakKeyDictionary[Channel, bytes] = weakref.WeakKeyDictionary()
        self._sessions: weakref.WeakKeyDictionary[ResumableChannel, bytes] = weakref.WeakKeyDictionary()
        self._ended: dict[bytes, tuple[float, DjinnError]] = {}
        """Tokens that have ended, until no ticket is valid any more that they were given before. From then on, the
        gateway alone decides: a clock may be set back, and an operator may restore a token."""

    def admit(self, channel: Channel, token: bytes) -> None:
        """Record that a token has admitted a connection; the empty token stands for none.

        Raises:
            TokenEndedError: The token has ended since.
        """
        with self._lock:
            self._check(token)
            self._admitted[channel] = token

    def hold(self, channel: Channel, session: ResumableChannel) -> None:
        """Record that a connection begins or resumes a session, which then ends with this connection's token.

        Raises:
            TokenEndedError: The token has ended since.
        """
        with self._lock:
            token = self._admitted.get(channel, b"")
            self._check(token)
            self._sessions[session] = token

    def end(self, token: bytes, why: Goodbye) -> list[ResumableChannel]:
        """Refuse a token, and return the sessions that it has admitted, for the caller to close.

        Args:
            token: Its identity.
            why: The reason for clients that present the token later.
        """
        with self._lock:
            now = self._clock()
            self._ended = {each: ended for each, ended in self._ended.items() if ended[0] > now}
            self._ended[token] = now + VALID_S, TokenEndedError(why.summary, hint=why.hint)
            return [session for session, own in self._sessions.items() if own == token]

    def _check(self, token: bytes) -> None:
        until, ended = self._ended.get(token, (0.0, None))
        if ended is not None and until > self._clock():
            raise ended
