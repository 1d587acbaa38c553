"""The sessions that a worker has."""

from __future__ import annotations

import logging
import threading
import time

import attrs
from djinn_lib_service.mailbox import Mailbox
from djinn_lib_service.post import MailPost
from djinn_lib_service.service import SessionService
from djinn_lib_service.steady import SteadyChannel

from djinn.wire.messages import Goodbye
from djinn_server.control import SessionState
from djinn_server.line import Place

__all__ = ("Held", "Sessions")

LOOK_S = 0.25
"""How often to look whether anybody still wants what a session computes."""
MAX_LISTED = 4096
"""Sessions that are told of at a time, those with most to do first."""
_log = logging.getLogger("djinn.server")


@attrs.frozen(eq=False)
class Held:
    """A session.

    Attributes:
        name: Its name.
        key_digest: Of the key to take it up again.
        channel: Its client's end.
        service: Its values and programs.
        post: Its ways to others.
        place: Its place in the line.
        mailbox: Where others deliver to it.
        began_s: When it began, by the monotonic clock.
    """

    name: str
    key_digest: bytes
    channel: SteadyChannel
    service: SessionService
    post: MailPost
    place: Place
    mailbox: Mailbox
    began_s: float = attrs.field(factory=time.monotonic)

    def state(self) -> SessionState:
        """Say what it does now."""
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
        self._held: dict[str, Held] = {}
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="djinn-leases", daemon=True)

    def add(self, session: Held) -> None:
        """A session has begun."""
        with self._lock:
            self._held[session.name] = session

    def remove(self, name: str) -> None:
        """A session has ended."""
        with self._lock:
            self._held.pop(name, None)

    def all(self) -> list[Held]:
        """List them."""
        with self._lock:
            return list(self._held.values())

    def states(self) -> tuple[SessionState, ...]:
        """Say what they do now."""
        found = sorted((session.state() for session in self.all()), key=lambda state: (-state.running_s, -state.queued))
        return tuple(found[:MAX_LISTED])

    def end(self, name: str, goodbye: Goodbye) -> None:
        """End a session, or all if no name is given; does not wait for clients, or for a kernel that runs."""
        for session in self.all():
            if name in ("", session.name):
                _log.warning("%s: session %s is ended: %s", session.channel.peer, session.name, goodbye.summary)
                # A client that does not read would hold up the others.
                threading.Thread(target=session.channel.close, args=(goodbye,), daemon=True).start()

    def start(self) -> None:
        """Begin to look for sessions whose clients are gone."""
        self._watcher.start()

    def stop(self) -> None:
        """Stop looking."""
        self._ended.set()

    def _watch(self) -> None:
        """End sessions that compute for nobody; idle ones notice by themselves."""
        while not self._ended.wait(LOOK_S):
            for session in self.all():
                if session.place.is_busy and session.channel.is_gone():
                    session.channel.close()
