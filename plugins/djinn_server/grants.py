"""By which tokens a worker's sessions were let in, so that the end of a token ends them."""

from __future__ import annotations

import threading
import weakref

from djinn_lib_service.steady import SteadyChannel

from djinn.errors import DjinnError, TokenEndedError
from djinn.kinds.transport import Channel
from djinn.wire.messages import Goodbye

__all__ = ("Grants",)


class Grants:
    """Connections and sessions, and their tokens' identities.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._admitted: weakref.WeakKeyDictionary[Channel, bytes] = weakref.WeakKeyDictionary()
        self._sessions: weakref.WeakKeyDictionary[SteadyChannel, bytes] = weakref.WeakKeyDictionary()
        self._ended: dict[bytes, DjinnError] = {}

    def admit(self, channel: Channel, token: bytes) -> None:
        """A connection was let in by a token; no token is an empty one.

        Raises:
            TokenEndedError: The token has ended since.
        """
        with self._lock:
            self._check(token)
            self._admitted[channel] = token

    def hold(self, channel: Channel, session: SteadyChannel) -> None:
        """A connection begins a session, or takes it up: from now on the session ends with this connection's token.

        Raises:
            TokenEndedError: The token has ended since.
        """
        with self._lock:
            token = self._admitted.get(channel, b"")
            self._check(token)
            self._sessions[session] = token

    def end(self, token: bytes, why: Goodbye) -> list[SteadyChannel]:
        """Let no more sessions in by a token, and return those that it has let in, which are to be closed.

        Args:
            token: Its identity.
            why: What clients hear that it lets in from now on.
        """
        with self._lock:
            self._ended[token] = TokenEndedError(why.summary, hint=why.hint)
            return [session for session, own in self._sessions.items() if own == token]

    def _check(self, token: bytes) -> None:
        ended = self._ended.get(token)
        if ended is not None:
            raise ended
