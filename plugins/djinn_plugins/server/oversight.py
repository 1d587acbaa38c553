"""Oversight of workers: programs that run too long, clients whose programs kill workers, and ended sessions.

The gateway does all of this, based on what workers have written on their boards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
import attrs
from anyio.abc import TaskGroup

from djinn.errors import DjinnError, ProgramTimeoutError, RefusedError
from djinn_plugins.server.board import Board, Running
from djinn_plugins.server.board import digest_of as digest_of_owner
from djinn_plugins.server.control import EndSession
from djinn_plugins.server.counters import Meters
from djinn_plugins.transport.resumable_channel import digest_of

__all__ = ("Offenders", "RunWatch", "Verdicts")

LOOK_S = 0.1
"""How often to check the running time of programs; a tenth of the limit if that is less."""
GRACE_S = 2.0
"""Time that a program gets after its session was ended; it can only stop between two of its steps."""
MAX_REMEMBERED = 1000
FIRST_DELAY_S, MAX_DELAY_S = 0.2, 30.0
"""How long a client is kept out after its program has killed a worker; doubles each time."""
FORGIVEN_S = 300.0
"""After this time without another kill, the next one counts as the first."""
_log = logging.getLogger("djinn.server")


class _Watched(Protocol):
    """The part of a worker that oversight uses."""

    @property
    def pid(self) -> int:
        """Its process ID."""

    @property
    def board(self) -> Board:
        """Its board."""

    async def tell(self, message: EndSession) -> None:
        """Send it a message."""

    def end(self, cause: str) -> None:
        """Kill it, and record the cause."""


class Verdicts:
    """The reasons why sessions were ended, for clients that missed the reason and try to resume their sessions.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, DjinnError] = OrderedDict()

    def add(self, key_digest: bytes, error: DjinnError) -> None:
        """Record that a session was ended for good."""
        with self._lock:
            self._known[key_digest] = error
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)

    def check(self, key: bytes) -> None:
        """Raise the error that ended the session with this key, if there is one.

        Raises:
            DjinnError: The session was ended.
        """
        with self._lock:
            error = self._known.get(digest_of(key))
        if error is not None:
            raise type(error)(error.summary, hint=error.hint)


@attrs.define
class _Offender:
    times: int = 0
    last_s: float = 0.0
    until_s: float = 0.0


class Offenders:
    """Owners of sessions whose programs have killed the shared worker; each time, the owner waits longer.

    The owner is a name that the client chooses. A malicious client can choose another name each time.

    Args:
        clock: Returns the current time, in seconds.

    Concurrency:
        Any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, _Offender] = OrderedDict()

    def add(self, owner_digest: bytes) -> float:
        """Record that a worker died running this owner's program; return how many seconds the owner has to wait."""
        now = self._clock()
        with self._lock:
            offender = self._known.setdefault(owner_digest, _Offender())
            self._known.move_to_end(owner_digest)
            offender.times = offender.times + 1 if now - offender.last_s < FORGIVEN_S else 1
            delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(offender.times - 1, 16))
            offender.last_s, offender.until_s = now, now + delay_s
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return delay_s

    def check(self, owner: str) -> None:
        """Refuse an owner that still has to wait.

        Raises:
            RefusedError: The owner has to wait; says how long.
        """
        with self._lock:
            offender = self._known.get(digest_of_owner(owner)) if owner and self._known else None
        left_s = 0.0 if offender is None else offender.until_s - self._clock()
        if offender is not None and left_s > 0:
            raise RefusedError(
                f"The server's worker has died {offender.times} times in a row while it ran a program of this client.",
                hint=f"Try again in {left_s:.3g} s; the server's log says how it died.", retry_after_s=left_s)


class RunWatch:
    """Ends sessions whose programs run too long, and kills the worker if such a program does not stop.

    Args:
        workers: Lists the current workers.
        verdicts: Records the reasons.
        limit_s: How long a program may run; 0 for no limit.
        meters: Count ended sessions.

    Attributes:
        limit_s: As above; a change takes effect at the next check, also for running programs.

    Concurrency:
        `run` is a task; any other sets `limit_s`.
    """

    def __init__(self, workers: Callable[[], Sequence[tuple[object, _Watched]]], verdicts: Verdicts, limit_s: float,
                 meters: Meters) -> None:
        self._workers = workers
        self._verdicts = verdicts
        self.limit_s = limit_s
        self._meters = meters
        self._told: dict[tuple[int, int], float] = {}
        """When sessions were ended, by process and by start time of the program that ran too long."""

    async def run(self) -> None:
        """Watch until cancelled."""
        async with anyio.create_task_group() as messages:
            while True:
                await anyio.sleep(min(LOOK_S, self.limit_s / 10 or LOOK_S))
                if limit_s := self.limit_s:
                    # A worker that stands still may not take the message that ends a session.
                    self._look(limit_s, messages)

    def _look(self, limit_s: float, messages: TaskGroup) -> None:
        late: dict[tuple[int, int], float] = {}
        for _, worker in self._workers():
            running = worker.board.read()
            if running is not None and running.age_s > limit_s:
                key = worker.pid, running.began_ns
                told_s = late[key] = self._told.get(key) or self._tell(worker, running, limit_s, messages)
                if time.monotonic() - told_s > GRACE_S:
                    _log.error("worker %d is ended: a program of session %s has run for %.1f s; the limit is %g s",
                               worker.pid, running.session, running.age_s, limit_s)
                    worker.end("max_run")
        self._told = late

    def _tell(self, worker: _Watched, running: Running, limit_s: float, messages: TaskGroup) -> float:
        _log.warning("session %s is ended: its program has run for %.1f s; the limit is %g s", running.session,
                     running.age_s, limit_s)
        error = ProgramTimeoutError(
            f"A program of session {running.session[:12]} ran for longer than {limit_s:g} s.",
            hint="Make programs shorter, or ask the server's operator for a higher --max-run-s; then call djinn.init() "
                 "to start a new session.")
        self._verdicts.add(running.key_digest, error)
        self._meters.end("max_run")
        messages.start_soon(worker.tell, EndSession(running.session, error.code, error.summary, error.hint))
        return time.monotonic()
