"""Records the token that admitted each session, so that the session ends with the token."""

from __future__ import annotations

import threading
import weakref

from djinn_lib_service.kinds.transport import Channel
from djinn_lib_service.resumable_channel import ResumableChannel

from djinn.errors import DjinnError, TokenEndedError
from djinn.wire.messages import Goodbye

__all__ = ("Grants",)


class Grants:
    """Maps connections and sessions to the identities of their tokens.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._admitted: weakref.WeakKeyDictionary[Channel, bytes] = weakref.WeakKeyDictionary()
        self._sessions: weakref.WeakKeyDictionary[ResumableChannel, bytes] = weakref.WeakKeyDictionary()
        self._ended: dict[bytes, DjinnError] = {}

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
            self._ended[token] = TokenEndedError(why.summary, hint=why.hint)
            return [session for session, own in self._sessions.items() if own == token]

    def _check(self, token: bytes) -> None:
        ended = self._ended.get(token)
        if ended is not None:
            raise ended
