"""One session's place in the line of its worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from djinn.errors import DjinnError, LimitError, TransportError
from djinn.ir.phase import ExecutionPhase
from djinn.wire.messages import Batch, Run, RunDelta
from djinn_plugins.common.kinds.executor import DeviceMark
from djinn_plugins.executor.pauses import Pause
from djinn_plugins.server.backlog import Backlog
from djinn_plugins.server.board import NOBODY, Mark
from djinn_plugins.server.recent import RecentSum

if TYPE_CHECKING:
    from djinn_plugins.server.run_queue import RunQueue

__all__ = ("BEGINNING_S", "MAX_RETRY_S", "PriorityClass", "SessionSlot", "too_much")

BEGINNING_S = 5.0
"""How much time of a session, before it is sent its first values, counts as used by all sessions of its tenant. When a
server's worker has died, a recovery repeats that much by default, and then sends the request that waits for it. If it
counted as the session's own, each of the others would use as much before the session had its next turn."""
_MIN_RETRY_S, MAX_RETRY_S = 0.05, 30.0


@attrs.define(eq=False)
class PriorityClass:
    """Programs of one priority class; see `djinn_plugins.server.fair_admission.fair_queue` for tags."""

    weight: float
    start: float = 0.0
    finish: float = 0.0
    virtual: float = 0.0
    """Virtual time among its sessions."""
    waiting: list[SessionSlot] = attrs.field(factory=list)


class SessionSlot:
    """One session's place in the line; see `djinn_plugins.executor.turns.Turns`.

    Attributes:
        stop: Holds the reason once the session's current work has been cancelled; empty until then.
        mark: Recorded on the board while its programs run.
        program: Name of the program that runs; empty if it has none.
        last_program: Name of the one that ran last.
        phase: What its programs are part of.
        breaks: What its running program has to do before its next step; see `djinn_plugins.executor.turns.Turns`.
        heard_s: When the last message arrived, or was finished.
        is_busy: Whether a message is being executed.

    Concurrency:
        The session's thread; `give_up` and `running_s` may be called by any thread.
    """

    stop: Sequence[DjinnError] = ()
    mark: Mark = NOBODY
    program: str = ""
    last_program: str = ""
    phase: ExecutionPhase = ExecutionPhase.UNKNOWN

    def __init__(self, line: RunQueue) -> None:
        self._line = line
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_busy = False
        self.is_busy = False
        self.heard_s = time.monotonic()
        self._excess = 0
        self.left = 0
        """Programs of the current message that have not finished."""
        self.is_decoding = False
        self.kind = PriorityClass(1.0)
        self.start = 0.0
        self.finish = 0.0
        self.beginning_s = BEGINNING_S
        """How much more of its time counts as used by all sessions."""
        self._sends_values = False
        """Whether the answer to the current message has values."""
        self.asked_s = 0.0
        self.began_s = 0.0
        """When its running program began, later by as long as it has paused."""
        self.counted_s = 0.0
        """How long its running program ran before its last pause."""
        self.before_s = 0.0
        """How long an asynchronous device has computed parts of a program that has paused."""
        self.breaks: list[BaseException] = []
        self._request = Pause(self._pause)
        self._backlog = Backlog(self._marked) if line.clock is not None and line.takes_turns else None
        self.first: DeviceMark | None = None
        """The mark before its running program."""
        self.recent = RecentSum()
        """How long it used the device lately."""

    def received(self, batch: Batch) -> None:
        """Record a message that is about to be executed."""
        self.is_busy = True
        self._sends_values = bool(batch.fetch)
        if batch.phase is not None:
            self.phase = batch.phase
            self.is_decoding = batch.phase is ExecutionPhase.LLM_DECODE
        runs = 0
        for command in batch.commands:
            if type(command) is Run or type(command) is RunDelta:
                runs += 1
        if not runs:
            return
        line = self._line
        with line.lock:
            if not self._is_busy:
                self._is_busy = True
                line.busy += 1
            self.left = runs
            line.queued += runs
            limit = line.limits().queued
            # Its first program is always admitted: a session that was admitted and sends no flood must not fail.
            queued = line.queued_of_all if limit else 0
            self._excess = min(runs - 1, queued - limit) if queued > limit else 0

    def carried_out(self, *, has_more: bool = False) -> None:
        """Record that a message was executed.

        Args:
            has_more: Whether the next message has already arrived.
        """
        self.is_busy, self.heard_s = has_more, time.monotonic()
        if self._sends_values and self.beginning_s < BEGINNING_S:
            self.beginning_s = 0.0
        if not self._is_busy:
            return
        line = self._line
        with line.lock:
            line.queued -= self.left
            self.left = self._excess = 0
            if not has_more:
                self._is_busy = False
                line.busy -= 1
                if not line.busy:
                    line.rest()

    def begin(self) -> None:
        """Wait until a program may run; see `djinn_plugins.executor.turns.Turns.begin`."""
        line = self._line
        self.asked_s = time.monotonic()
        if self._excess and self.left <= self._excess:
            self._refuse()
        with line.lock:
            is_first = line.enter(self)
        if is_first:
            self.began_s = self.asked_s
            self._mark_begin()
            return
        self._gate.acquire()
        self.began_s = time.monotonic()
        if line.running is not self:
            if self.stop:
                raise self.stop[0]
            raise TransportError("The server is ending.", hint="Use another server, or this one later.")
        self._mark_begin()

    def _marked(self) -> DeviceMark | None:
        with self._line.lock:
            return None if self._line.clock is None else self._line.clock.mark()

    def _mark_begin(self) -> None:
        clock = self._line.clock
        if clock is not None:
            with self._line.lock:
                self.first = clock.mark()
                if self._backlog is not None:
                    clock.feed()
                    if self._backlog.is_long:
                        self.ask_to_pause()

    def end(self) -> None:
        """Record that the program has finished; see `djinn_plugins.executor.turns.Turns.end`."""
        line = self._line
        if line.is_recalled:
            line.settle()
        with line.lock:
            if self.left:
                self.left -= 1
                line.queued -= 1
            line.end(self, time.monotonic())

    def load(self) -> float:
        """Return how busy the device is with others; see `djinn_plugins.executor.turns.Turns.load`."""
        return self._line.load_of_others(self)

    def running_s(self, now: float) -> float:
        """Return how long the session's program has been running; 0 if none is."""
        if self._line.running is self:
            return max(0.0, now - self.began_s)
        if self._line.paused is self:
            return self.counted_s
        clock = self._line.clock
        span = None if clock is None else clock.oldest
        return 0.0 if span is None or span.owner is not self else max(0.0, now - span.since_ns / 1e9)

    def give_up(self) -> None:
        """Make a waiting `begin` raise the reason in ``stop``, or end a program that has begun, also if it pauses."""
        with self._line.lock:
            self.breaks += self.stop[:1]
            self._line.leave(self)

    def ask_to_pause(self) -> None:
        """Have the running program pause before its next step; the caller holds the line's lock."""
        if self._request not in self.breaks:
            self.breaks.append(self._request)

    def _pause(self) -> None:
        """Wait for a device that is far behind, and for the next turn if this one is over; between two steps."""
        line = self._line
        if self._backlog is not None:
            self._backlog.step()
        if line.is_over(time.monotonic()):
            line.settle()
        with line.lock:
            if self._backlog is None or not self._backlog.is_long:
                self.breaks.remove(self._request)
            waits = line.pause(self, time.monotonic())
        if waits:
            if self._backlog is not None:
                self._backlog.clear()
            self._gate.acquire()
            self._mark_begin()

    def wake(self) -> None:
        """Make `begin` or a pause return."""
        self._gate.release()

    @property
    def is_wanted(self) -> bool:
        """Whether others are waiting for the device, so that it has no time for predicted requests."""
        return self._line.is_wanted

    def _refuse(self) -> None:
        line = self._line
        with line.lock:
            queued, interval_s = line.queued, line.interval_s
            self.left -= 1
            line.queued -= 1
        line.reject("queued")
        raise too_much(f"There would be {queued} programs waiting; the limit is {line.limits().queued}.",
                       queued * interval_s / 2)


def too_much(summary: str, retry_after_s: float) -> LimitError:
    """Return the error for a client that is to come back later."""
    return LimitError(summary, hint="Try again later, ask for values more often, or ask the server's operator for "
                                    "more.",
                      retry_after_s=min(MAX_RETRY_S, max(_MIN_RETRY_S, retry_after_s)))
