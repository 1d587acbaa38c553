"""The sessions of a worker."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import suppress

import attrs

from djinn.errors import DjinnError
from djinn.wire.messages import Goodbye
from djinn_plugins.common.kinds.transport import Channel
from djinn_plugins.common.operators.named_values import NamedSession
from djinn_plugins.executor.mailbox import Mailbox
from djinn_plugins.executor.peer_exchange import PeerExchange
from djinn_plugins.executor.service import SessionService
from djinn_plugins.server.control import MAX_LISTED, SessionState
from djinn_plugins.server.counters import MAX_NAMED
from djinn_plugins.server.memory import SpareMemory
from djinn_plugins.server.named_sessions import NamedSessions, SessionNames
from djinn_plugins.server.session_slot import SessionSlot
from djinn_plugins.transport.resumable_channel import ResumableChannel

__all__ = ("HeldSession", "Sessions")

LOOK_S = 0.25
"""How often to check whether the clients of busy sessions are still connected."""
LOOKS_AT_MEMORY = 4
"""After how many of these looks to look at the device's memory, too."""
PARTING_S = 1.0
"""How long to wait until clients were told why their sessions end, before the process ends."""
_log = logging.getLogger("djinn.server")


@attrs.frozen(eq=False)
class HeldSession:
    """A session.

    Attributes:
        name: Its name.
        key_digest: Digest of the key that resumes it.
        channel: Its connection to the client.
        service: Its values and programs.
        post: Its connections to other sessions.
        place: Its place in the line.
        mailbox: Where other sessions deliver values to it.
        names: The named sessions, as it uses them.
        began_s: When it began, by the monotonic clock.
    """

    name: str
    key_digest: bytes
    channel: ResumableChannel
    service: SessionService
    post: PeerExchange
    place: SessionSlot
    mailbox: Mailbox
    names: SessionNames
    began_s: float = attrs.field(factory=time.monotonic)

    def state(self) -> SessionState:
        """Return its current state."""
        now, place = time.monotonic(), self.place
        running_s = place.running_s(now)
        return SessionState(
            self.name, self.key_digest, self.channel.peer, now - self.began_s,
            0.0 if place.is_busy else now - place.heard_s, place.left, running_s, self.service.held_bytes,
            self.service.live_handles, self.names.name, program=place.program or place.last_program)


class Sessions:
    """The sessions of a worker, by name.

    Args:
        spare: Looked after while sessions last; ``None`` if there is nothing to look after.
        named: The named sessions, which are dropped when their leases are over.

    Concurrency:
        Any thread.
    """

    def __init__(self, spare: SpareMemory | None = None, named: NamedSessions | None = None) -> None:
        self._spare = spare
        self._named = named
        self._lock = threading.Lock()
        self._held: dict[str, HeldSession] = {}
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="djinn-leases", daemon=True)

    def add(self, session: HeldSession) -> None:
        """Add a session that has begun."""
        with self._lock:
            self._held[session.name] = session

    def remove(self, name: str) -> None:
        """Remove a session that has ended."""
        with self._lock:
            self._held.pop(name, None)

    def all(self) -> list[HeldSession]:
        """List them."""
        with self._lock:
            return list(self._held.values())

    def states(self) -> tuple[SessionState, ...]:
        """Return the state of each, and of named sessions that no client has open."""
        found = sorted((session.state() for session in self.all()), key=lambda state: (-state.running_s, -state.queued))
        for session, left_s_ago, named, count in () if self._named is None else self._named.closed():
            found.append(SessionState(session, b"", "", left_s_ago, left_s_ago, 0, 0.0, named.size_bytes, count,
                                      named.name, named.left_s))
        return tuple(found[:MAX_LISTED])

    def states_and_names(self) -> tuple[tuple[SessionState, ...], tuple[NamedSession, ...]]:
        """Return what `states` does, and the named sessions as clients see them."""
        return self.states(), () if self._named is None else self._named.listed()[:MAX_NAMED]

    def end(self, name: str, goodbye: Goodbye) -> None:
        """End a session, or all if the name is empty; does not wait for clients, or for a running kernel."""
        if self._named is not None:
            self._named.end(name)
        for session in self.all():
            if name in ("", session.name):
                _end(session, goodbye)

    def rename(self, name: str, holder: str) -> None:
        """Rename a named session, because the server at that address has a later one."""
        if self._named is not None:
            self._named.rename(name, holder)

    def end_others(self, channel: Channel, error: DjinnError) -> None:
        """End all sessions except that of a connection; waits a moment, so that clients learn the reason."""
        goodbye = Goodbye(error.code, error.summary, error.hint)
        ending = [_end(session, goodbye) for session in self.all() if session.channel is not channel]
        until_s = time.monotonic() + PARTING_S
        for thread in ending:
            thread.join(max(0.0, until_s - time.monotonic()))

    def start(self) -> None:
        """Start looking for sessions whose clients are gone."""
        self._watcher.start()

    def stop(self) -> None:
        """Stop looking."""
        self._ended.set()

    def _watch(self) -> None:
        """End busy sessions whose clients are gone; idle sessions notice that themselves."""
        looks = itertools.count()
        while not self._ended.wait(LOOK_S):
            for session in self.all():
                if session.place.is_busy and session.channel.is_gone():
                    session.channel.close()
            if self._named is not None:
                self._named.expire()
            if self._spare is not None and next(looks) % LOOKS_AT_MEMORY == 0:
                # A device that is lost tells nothing of its memory, and its process ends.
                with suppress(RuntimeError):
                    self._spare.look()


def _end(session: HeldSession, goodbye: Goodbye) -> threading.Thread:
    _log.warning("%s: session %s is ended: %s", session.channel.peer, session.name, goodbye.summary)
    # In its own thread, because a client that does not read would delay the others.
    ending = threading.Thread(target=session.channel.close, args=(goodbye,), daemon=True)
    ending.start()
    return ending
