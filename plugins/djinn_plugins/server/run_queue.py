"""The line: decides which session of a worker runs a program next, and when the worker needs the device."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import msgspec

from djinn.errors import TransportError
from djinn.ir.phase import ExecutionPhase
from djinn_plugins.common.kinds.executor import DeviceMark
from djinn_plugins.server.board import Board
from djinn_plugins.server.device_clock import DeviceClock, DeviceSpan
from djinn_plugins.server.kinds.metrics import BUCKETS_S, Counts, ProgramTime
from djinn_plugins.server.program_times import ProgramTimes
from djinn_plugins.server.recent import RECENT_S, RecentSum
from djinn_plugins.server.session_slot import MAX_RETRY_S, PriorityClass, SessionSlot, too_much
from djinn_plugins.server.tenant_limits import Limited, Limits
from djinn_plugins.server.tenant_use import Alone, Amount, OthersUse

__all__ = ("DeviceLease", "RunQueue")

DECODE_WEIGHT = 9.0
"""Weight of decoding language models, compared with all other programs of their tenant. They run first as long as they
leave the others their share, so the others never starve."""
CREDIT_S = 0.05
"""How far a session's virtual time may lag when it joins the line. A session that waits for each answer before its next
request is never in the line when the next program is chosen; with this credit, it still gets its share."""
MAX_LOAD = 0.95
"""A device is never reported as busier with others: work would seem to take forever there."""
_SMOOTHING = 0.2
_BETWEEN_TRIES_S = 0.1
"""Interval between the retries of refused sessions. Refusing a session takes milliseconds that programs could use."""


class DeviceLease(Protocol):
    """Source of turns on the device, if other workers use it too."""

    def ask(self) -> None:
        """Request a turn; `RunQueue.granted` is called when it is granted."""

    def give_back(self, turn: int, *, wants_more: bool) -> None:
        """Give a turn back."""


class RunQueue:
    """Runs one program of a worker at a time; its sessions share the device time fairly.

    Decoding steps of language models run first, within the share that `DECODE_WEIGHT` allows.

    Args:
        turnstile: Source of turns on the device; ``None`` if the worker has it to itself.
        limits: Returns the tenant's current limits.
        settle: Waits until the device has finished its queued work.
        reject: Called with each limit that refuses a request.
        board: Where the running program's session is recorded; ``None`` if it need not be.
        mark: Marks a point in the work of a device that computes asynchronously. Then the device's time counts: the
            board shows whose program it computes, and sessions are charged for that, when it is known.
        use: What the tenant's other workers use.

    Concurrency:
        Any thread; each `SessionSlot` is used by one.

    Laws:
        server.repeats_shared, server.turns_between_steps
    """

    def __init__(
        self, turnstile: DeviceLease | None = None, *, limits: Callable[[], Limits] = Limits,
        settle: Callable[[], None] = lambda: None, reject: Callable[[Limited], None] = lambda limited: None,
        board: Board | None = None, mark: Callable[[], DeviceMark] | None = None, use: OthersUse | None = None,
    ) -> None:
        self.clock: DeviceClock[SessionSlot] | None = None if mark is None else DeviceClock(mark)
        self._board = board
        self._use = use or Alone()
        self.limits = limits
        self.reject = reject
        self.settle = settle
        self.lock = threading.Lock()
        self._queued = 0
        self.busy = 0
        """Sessions that are executing a message, or have received the next one."""
        self.is_recalled = False
        self.running: SessionSlot | None = None
        self.paused: SessionSlot | None = None
        """Whose program waits between two of its steps. It holds the executor, so no other one of this worker runs."""
        self._since_ns = 0
        self._turnstile = turnstile
        self._turn = 0 if turnstile is None else -1
        """The current turn; -1 for none."""
        self._has_asked = self._had_turn = False
        self._until_s = math.inf
        self._is_closed = False
        self._usual, self._decode = PriorityClass(1.0), PriorityClass(DECODE_WEIGHT)
        self._virtual = 0.0
        self._waiting = 0
        self._waiting_since_s = 0.0
        self._last_end_s = 0.0
        self._next_try_s = 0.0
        self.interval_s = 0.0
        """Smoothed time from the end of one program to the end of the next, while the line is not empty."""
        self._waits = [0] * (len(BUCKETS_S) + 1)
        self._wait_s = 0.0
        self._used_s = 0.0
        self._programs = ProgramTimes()
        self._recent = RecentSum()
        """How long the device was in use lately, by sessions of this worker and by other workers that it waited for."""
        self._asked_s = 0.0

        if self.clock is not None:
            threading.Thread(target=self.clock.watch, args=(self.look,), name="djinn-device-clock", daemon=True).start()

    @property
    def queued(self) -> int:
        """Programs received from sessions that have not finished."""
        return self._queued

    @queued.setter
    def queued(self, count: int) -> None:
        self._queued = count
        self._use.put(Amount.QUEUED, count)

    @property
    def queued_of_all(self) -> int:
        """Those of the tenant's other workers, too."""
        return self._queued + self._use.others(Amount.QUEUED)

    def open(self) -> SessionSlot:
        """Add a session."""
        return SessionSlot(self)

    def look(self) -> bool:
        """Charge sessions for what the device has finished; return false once the line is closed."""
        with self.lock:
            if self.clock is None or self._is_closed:
                return False
            for span, device_s in self.clock.finished():
                self._charge(span.owner, device_s - span.host_s)
                self._used(span.owner, device_s, time.monotonic())
                span.owner.before_s += device_s
                if not span.is_part:
                    self._ran(span.program, span.owner.before_s)
                    span.owner.before_s = 0.0
            if self.running is not None and self._turnstile is not None:
                self.running.ask_to_pause()
            self._show()
        return True

    @property
    def takes_turns(self) -> bool:
        """Whether other workers use the device, too."""
        return self._turnstile is not None

    def _ran(self, program: tuple[str, ExecutionPhase], seconds: float) -> None:
        if program[0]:
            self._programs.add(program, seconds)

    def _used(self, place: SessionSlot, used_s: float, now: float) -> None:
        self._used_s += used_s
        self._recent.add(used_s, now)
        place.recent.add(used_s, now)

    def _counted_s(self, place: SessionSlot, used_s: float) -> float:
        """Return how much of the time that a session has used counts against it."""
        shared_s = min(max(0.0, used_s), place.beginning_s)
        place.beginning_s -= shared_s
        return used_s - shared_s + shared_s / max(1, self.busy)

    def _charge(self, place: SessionSlot, more_s: float) -> None:
        kind = place.kind
        place.finish += self._counted_s(place, more_s)
        kind.finish += more_s / kind.weight
        if kind.waiting:
            kind.start += more_s / kind.weight

    def _show(self) -> None:
        """Write to the board whose program the device computes; the caller holds the lock."""
        if self._board is None:
            return
        span = None if self.clock is None else self.clock.oldest
        if span is not None:
            self._board.begin(span.owner.mark, span.since_ns)
        elif self.running is not None:
            self._board.begin(self.running.mark, self._since_ns)
        else:
            self._board.end()

    def close(self) -> None:
        """Stop running programs and wake all waiting sessions. Never raises; may be called twice."""
        with self.lock:
            self._is_closed = True
            if self.clock is not None:
                self.clock.stop()
            for kind in (self._usual, self._decode):
                for place in tuple(kind.waiting):
                    self.leave(place)

    def granted(self, turn: int) -> None:
        """Accept a turn: the worker may use the device until the turn is recalled."""
        with self.lock:
            now = time.monotonic()
            if self._has_asked and self._had_turn:
                # Other workers had the device. The first turn is waited for in any case.
                self._recent.add(now - self._asked_s, now)
            self._had_turn = True
            self._turn, self._has_asked, self.is_recalled, self._until_s = turn, False, False, math.inf
            self._let_next(now)

    def recalled(self, turn: int, left_s: float) -> None:
        """Prepare to give a turn back: no program starts after ``left_s``, and the worker does not wait for work."""
        with self.lock:
            if turn != self._turn:
                return
            now = time.monotonic()
            self.is_recalled, self._until_s = True, min(self._until_s, now + left_s)
            if self.running is not None:
                if self._until_s <= now:
                    self.running.ask_to_pause()
            elif self._until_s <= now or not self.busy:
                self._give_back(wants_more=False)

    def check(self) -> None:
        """Check that there is capacity for another session.

        Raises:
            LimitError: It would wait too long. Says when to try again.
        """
        limits = self.limits()
        with self.lock:
            queued, interval_s, wait_s = self.queued_of_all, self.interval_s, self._expected_wait_s()
        if limits.queued and queued >= limits.queued:
            self.reject("queued")
            raise too_much(f"{queued} programs wait already; the limit is {limits.queued}.",
                           queued * interval_s / 2 + self._turn_to_ask_s())
        if limits.wait_s and wait_s > limits.wait_s:
            self.reject("wait")
            raise too_much(f"A program would wait for some {wait_s:.3g} s; the limit is {limits.wait_s:g} s.",
                           wait_s - limits.wait_s + self._turn_to_ask_s())

    def _turn_to_ask_s(self) -> float:
        """Assign a refused client its own time to retry, in seconds from now, so that a crowd retries one by one."""
        with self.lock:
            now = time.monotonic()
            self._next_try_s = min(max(now, self._next_try_s + _BETWEEN_TRIES_S), now + MAX_RETRY_S)
            return self._next_try_s - now

    def counts(self, counts: Counts) -> Counts:
        """Add the line's counters, and tell the tenant's other workers how long one waits here."""
        with self.lock:
            self._use.put(Amount.WAIT_NS, int(self._own_wait_s() * 1e9))
            return msgspec.structs.replace(counts, waits=tuple(self._waits), wait_ns=int(self._wait_s * 1e9),
                                           device_ns=int(self._used_s * 1e9))

    def slowest_programs(self) -> tuple[ProgramTime, ...]:
        """Return the programs that took the most time."""
        with self.lock:
            return self._programs.slowest()

    @property
    def is_wanted(self) -> bool:
        """Whether another session or another worker is waiting for the device."""
        return self.is_recalled or self._waiting > 0 or self._turn < 0

    def enter(self, place: SessionSlot) -> bool:
        """Start a session's program if the device is free, otherwise queue the session; the caller holds the lock.

        Raises:
            TransportError: The server is ending.
            DjinnError: The reason why the program was cancelled.
        """
        if place.stop:
            raise place.stop[0]
        if self._is_closed:
            raise TransportError("The server is ending.", hint="Use another server, or this one later.")
        place.breaks.clear()
        place.counted_s = 0.0
        kind = self._decode if place.is_decoding else self._usual
        if not kind.waiting and (self.running is None or self.running.kind is not kind):
            kind.start = max(self._virtual, kind.finish)
        place.kind, place.start = kind, max(kind.virtual - CREDIT_S, place.finish)
        if self.running is None and not self._waiting and self._turn >= 0:
            self._begin(place)
            self._waits[0] += 1
            return True
        self._queue(place, place.asked_s)
        if self._turn < 0 and not self._has_asked and self._turnstile is not None:
            self._has_asked, self._asked_s = True, place.asked_s
            self._turnstile.ask()
        return False

    def _queue(self, place: SessionSlot, now: float) -> None:
        if not self._waiting:
            self._waiting_since_s = now
        place.kind.waiting.append(place)
        self._waiting += 1

    def is_over(self, now: float) -> bool:
        """Whether the turn is over, so that a program gives way before its next step."""
        return self.is_recalled and now >= self._until_s

    def pause(self, place: SessionSlot, now: float) -> bool:
        """Give the turn back between two steps of a program if it is over; the caller holds the lock.

        Returns:
            Whether the program has to wait for its next turn, from which it is counted on.
        """
        if place.stop or self._is_closed or not self.is_over(now):
            return False
        self._end_part(place, now, is_part=True)
        place.start, place.kind.start = place.finish, place.kind.finish
        self.running, self.paused = None, place
        self._queue(place, now)
        self._show()
        self._give_back(wants_more=True)
        return True

    def _end_part(self, place: SessionSlot, now: float, *, is_part: bool = False) -> None:
        """Count what a program has used since its last pause, or since it began."""
        part_s, kind = now - place.began_s - place.counted_s, place.kind
        place.counted_s += part_s
        place.finish = place.start + self._counted_s(place, part_s)
        kind.finish = kind.start + part_s / kind.weight
        if kind.waiting:
            kind.start = kind.finish
        program = place.program, place.phase
        if self.clock is not None:
            self.clock.is_fed = False
        last = None if self.clock is None else self.clock.mark()
        if self.clock is None or place.first is None or last is None:
            self._used(place, part_s, now)
            if not is_part:
                self._ran(program, place.counted_s)
        else:
            self.clock.add(DeviceSpan(place, place.first, last, part_s, self._since_ns, program, is_part=is_part))

    def end(self, place: SessionSlot, now: float) -> None:
        """Record that a session's program has finished; the caller holds the lock."""
        self._end_part(place, now)
        interval_s = now - max(self._last_end_s, place.asked_s)
        self.interval_s += (interval_s - self.interval_s) * (_SMOOTHING if self.interval_s else 1.0)
        self._last_end_s = now
        self.running = None
        place.program, place.last_program = "", place.program or place.last_program
        self._show()
        if self.is_recalled and now >= self._until_s:
            self._give_back(wants_more=bool(self._waiting or place.left))
        elif self._waiting:
            self._let_next(now)

    def leave(self, place: SessionSlot) -> None:
        """Remove a session from the queue if it is waiting; the caller holds the lock."""
        if place not in place.kind.waiting:
            return
        place.kind.waiting.remove(place)
        self._waiting -= 1
        if place is self.paused:
            # It ends, or there are no more turns.
            self._resume(place, time.monotonic())
        place.wake()

    def rest(self) -> None:
        """Record that no session has anything to run now; the caller holds the lock."""
        if self.is_recalled and self.running is None and not self._waiting:
            self._give_back(wants_more=False)

    def _let_next(self, now: float) -> None:
        if self.running is not None or not self._waiting or self._turn < 0:
            return
        kind = min((kind for kind in (self._decode, self._usual) if kind.waiting), key=lambda kind: kind.start)
        place = self.paused or min(kind.waiting, key=lambda place: place.start)
        place.kind.waiting.remove(place)
        self._waiting -= 1
        self._waiting_since_s = now
        if place is self.paused:
            self._resume(place, now)
        else:
            self._waits[bisect_left(BUCKETS_S, now - place.asked_s)] += 1
            self._wait_s += now - place.asked_s
            self._begin(place)
        place.wake()

    def _resume(self, place: SessionSlot, now: float) -> None:
        self.paused = None
        place.began_s = now - place.counted_s
        self._begin(place)

    def _begin(self, place: SessionSlot) -> None:
        self.running, self._since_ns = place, time.monotonic_ns() - int(place.counted_s * 1e9)
        self._show()
        self._virtual = max(self._virtual, place.kind.start)
        place.kind.virtual = max(place.kind.virtual, place.start)

    def _give_back(self, *, wants_more: bool) -> None:
        turn, self._turn = self._turn, -1
        self.is_recalled, self._has_asked, self._asked_s = False, wants_more, time.monotonic()
        if self._turnstile is not None:
            self._turnstile.give_back(turn, wants_more=wants_more)

    def load_of_others(self, place: SessionSlot) -> float:
        """Return the fraction of the last seconds in which the device was in use, but not by a session."""
        now = time.monotonic()
        with self.lock:
            others_s = self._recent.at(now) - place.recent.at(now)
            if self.running is not None and self.running is not place:
                others_s += now - self._since_ns / 1e9
        return min(MAX_LOAD, max(0.0, others_s / RECENT_S))

    def _expected_wait_s(self) -> float:
        """Estimate how long a program of another session would wait; the caller holds the lock.

        It waits for one program of each session that has any, however many these have queued. The estimate is at least
        the time that the running program has taken so far, or that the first waiting one has waited, here or in another
        worker of the tenant.
        """
        return max(self._own_wait_s(), self._use.most_of_others(Amount.WAIT_NS) / 1e9)

    def _own_wait_s(self) -> float:
        now = time.monotonic()
        waiting_s = now - self._waiting_since_s if self._waiting else 0.0
        span = None if self.clock is None else self.clock.oldest
        since_ns = span.since_ns if span is not None else self._since_ns if self.running is not None else 0
        running_s = now - since_ns / 1e9 if since_ns else 0.0
        return max(min(self.queued, self.busy) * self.interval_s, waiting_s, running_s)
