"""The sessions of a worker."""

from __future__ import annotations

import logging
import threading
import time

import attrs
from djinn_lib_service.mailbox import Mailbox
from djinn_lib_service.peer_exchange import PeerExchange
from djinn_lib_service.resumable_channel import ResumableChannel
from djinn_lib_service.service import SessionService

from djinn.wire.messages import Goodbye
from djinn_server.control import SessionState
from djinn_server.run_queue import SessionSlot

__all__ = ("HeldSession", "Sessions")

LOOK_S = 0.25
"""How often to check whether the clients of busy sessions are still connected."""
MAX_LISTED = 4096
"""Maximum number of sessions in a report, the busiest first."""
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
        began_s: When it began, by the monotonic clock.
    """

    name: str
    key_digest: bytes
    channel: ResumableChannel
    service: SessionService
    post: PeerExchange
    place: SessionSlot
    mailbox: Mailbox
    began_s: float = attrs.field(factory=time.monotonic)

    def state(self) -> SessionState:
        """Return its current state."""
        now, place = time.monotonic(), self.place
        running_s = place.running_s(now)
        return SessionState(
            self.name, self.key_digest, self.channel.peer, now - self.began_s,
            0.0 if place.is_busy else now - place.heard_s, place.left, running_s, self.service.held_bytes,
            self.service.live_handles)


class Sessions:
    """The sessions of a worker, by name.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
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
        """Return the state of each."""
        found = sorted((session.state() for session in self.all()), key=lambda state: (-state.running_s, -state.queued))
        return tuple(found[:MAX_LISTED])

    def end(self, name: str, goodbye: Goodbye) -> None:
        """End a session, or all if the name is empty; does not wait for clients, or for a running kernel."""
        for session in self.all():
            if name in ("", session.name):
                _log.warning("%s: session %s is ended: %s", session.channel.peer, session.name, goodbye.summary)
                # In its own thread, because a client that does not read would delay the others.
                threading.Thread(target=session.channel.close, args=(goodbye,), daemon=True).start()

    def start(self) -> None:
        """Start looking for sessions whose clients are gone."""
        self._watcher.start()

    def stop(self) -> None:
        """Stop looking."""
        self._ended.set()

    def _watch(self) -> None:
        """End busy sessions whose clients are gone; idle sessions notice that themselves."""
        while not self._ended.wait(LOOK_S):
            for session in self.all():
                if session.place.is_busy and session.channel.is_gone():
                    session.channel.close()
