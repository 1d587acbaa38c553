"""Speculator: the executor's side runs the most likely next programs while it is idle.

A loop requests the same programs in the same order, and earlier runs predict later ones. So the executor's side need
not wait for the request: while the client computes, or its message is in flight, the next programs run ahead. It cannot
be observed when they ran: if they draw random numbers, the state of these before the run is kept, and if they write to
existing values, the elements that they overwrite; both are restored if the run is dropped. Their inputs may change
before the client requests the run; therefore all runs ahead are dropped as soon as the client requests anything other
than the predicted run, or reads what they have written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import attrs
import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Command, Free, Receive, Run, RunDelta, Send
from djinn_plugins.common.kinds.executor import RandomState, Undo
from djinn_plugins.common.wire.assumptions import Assumed, merged
from djinn_plugins.common.wire.delta import PredictedRuns, RunPredictor
from djinn_plugins.executor.exchange_forecast import Exchange, ExchangeForecast, run_of

CONFIDENT = 3
"""How many times in a row one program must have followed another, as predicted, before it runs ahead."""
MOST_CONFIDENT = 3 * CONFIDENT
"""Repetitions beyond this do not count: then two exceptions, such as the ends of loops, do not end the confidence."""
MAX_AHEAD = 32
"""Most runs that can be ahead."""
MAX_STEPS_AHEAD = 4 * MAX_AHEAD
"""Most runs and exchanges that can be ahead."""
FEW_AHEAD = 4
"""Runs that can be ahead whatever their results need. Further ones are measured when they run."""
MIN_RESULT_BYTES = 2 * 2**20
RESULT_SHARE = 4
"""No program runs ahead while the measured runs have new results of so many bytes, or of a quarter of what the session
holds, if that is more: each round of a text copies its small caches.
"""
MAX_UNDO_BYTES = 64 * 2**20
"""Most bytes that are kept because runs ahead have overwritten them."""
MAX_RECENT = 64
"""Runs that are remembered to find out which of their results is fetched."""


@attrs.frozen
class RunAhead:
    """A run, or an exchange, that the client has not requested yet.

    Attributes:
        run: The run, or an exchange in that form.
        outputs: Its results.
        new_bytes: Bytes of the storages that it has made for them; 0 for one of the first `FEW_AHEAD`.
        random: The state of the session's random numbers before it, if it drew some.
        undo: The overwritten values, if it wrote to any.
        repeats: Whether another run on the same inputs gives the same results, bit for bit.
        exchange: The exchange, if it is one.
        arrived: The value that it has received from another session, as that is known to `Abroad`.
        assumes: What that value assumes.
    """

    run: Run
    outputs: list[Any]
    new_bytes: int = 0
    random: torch.Tensor | None = None
    undo: Undo | None = None
    repeats: bool = True
    exchange: Exchange | None = None
    arrived: Any = None
    assumes: tuple[Assumed, ...] = ()

    @property
    def command(self) -> Command:
        """The command by which the client is expected to request it."""
        return RunDelta(self.run.program) if self.exchange is None else self.exchange


class Abroad(Protocol):
    """How a session that runs ahead exchanges values with others before that is requested.

    Concurrency:
        One thread at a time.
    """

    def look(self, command: Receive) -> RunAhead | None:
        """Return a value that another session has sent ahead; ``None`` if there is none yet, or it is void."""

    def is_valid(self, ahead: RunAhead) -> bool:
        """Whether a value that was received ahead is not void yet."""

    def withdraw(self) -> None:
        """Make the values void that were sent to other sessions ahead."""


@attrs.frozen
class LoopLength:
    """How often in a row a program was followed by its usual follower.

    Attributes:
        now: In the loop that runs.
        last: In the loop before it.
        before: In the one before that.
    """

    now: int = 0
    last: int = 0
    before: int = 0

    def continued(self) -> LoopLength:
        """Return the counts after the usual follower."""
        return attrs.evolve(self, now=self.now + 1)

    def ended(self, *, begun: bool) -> LoopLength:
        """Return the counts after another program, which may be the usual follower from now on."""
        return LoopLength(int(begun), self.now, self.last)

    def is_reached(self, more: int) -> bool:
        """Whether the loop is as long as the last two, which were of one length, after ``more`` runs."""
        return 0 < self.last == self.before == self.now + more


class Speculator:
    """The programs that one session has run ahead.

    Args:
        forecast: Predicts runs.
        random: The session's random numbers.

    Attributes:
        hits: Runs that had already run ahead when the client requested them.
        misses: Runs that ran ahead and were dropped.
        is_repeating: Whether a program may be ahead several times, as is useful if values are sent to the client early.
        pinned: How many runs, the next ones, have given a value that was sent to the client or another session early.
        abroad: Exchanges values with other sessions ahead; ``None`` if that is impossible.
        awaits: Whether the next step ahead is to receive a value that is not here yet.
        steps: Numbers of the programs and exchanges that were requested since this list was cleared; 0 for one that
            cannot be predicted.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, forecast: RunPredictor, random: RandomState) -> None:
        self._random = random
        self._forecast = PredictedRuns(forecast)
        self._followers: dict[int, tuple[int, int]] = {}
        self._lengths: dict[int, LoopLength] = {}
        self._exact: set[int] = set()
        """Programs whose last run was as predicted."""
        self._last = 0
        self._ahead: deque[RunAhead] = deque()
        self._recent: deque[Run] = deque(maxlen=MAX_RECENT)
        self.hits = 0
        self.misses = 0
        self.is_repeating = False
        self.pinned = 0
        self._exchanges = ExchangeForecast(self.place_of)
        self.abroad: Abroad | None = None
        self.awaits = False
        self.steps: list[int] = []
        self._depends = False
        """Whether something ahead may depend on a value that was received ahead."""
        self._is_void = False
        """Whether values may have been sent ahead that are no longer ahead here."""

    def asked(self, command: Run | RunDelta) -> list[Any] | None:
        """Process a requested run; call this before the forecast sees the run.

        Returns:
            Its results, if the run is already ahead.
        """
        program = command.program
        self.steps.append(program)
        self._exchanges.ran()
        is_expected = type(command) is RunDelta and command == RunDelta(program)
        is_hit = bool(self._ahead) and is_expected and self._ahead[0].run.program == program
        self._learn(program, is_expected=is_expected, is_wasted=bool(self._ahead) and not is_hit)
        if not is_hit:
            self.drop()
            return None
        self.hits += 1
        return self._taken().outputs

    def _taken(self) -> RunAhead:
        self.pinned = max(0, self.pinned - 1)
        taken = self._ahead.popleft()
        if not self._ahead:
            self._forecast.clear()
            self._exchanges.clear()
            self._depends = False
        return taken

    def exchanged(self, command: Exchange) -> RunAhead | None:
        """Process a requested exchange, before it is carried out.

        Returns:
            The exchange, if it is already ahead.
        """
        next_ahead = self._ahead[0] if self._ahead else None
        is_hit = next_ahead is not None and next_ahead.exchange == command
        if isinstance(command, Free) and self._last >= 0 and not is_hit:
            # Only what follows another exchange follows it each time: other values die at any time.
            self.steps.append(0)
            self.freed(command.handles)
            return None
        number = self._exchanges.number_of(command)
        self.steps.append(number or 0)
        if not is_hit and not (isinstance(command, Send) and (next_ahead is None or next_ahead.exchange is None)):
            # A value that is only read changes nothing that is ahead.
            self.drop()
        if number is None:
            self._last = 0
            return None
        is_expected = self._exchanges.requested(number, command)
        self._learn(number, is_expected=is_expected, is_wasted=next_ahead is not None and not is_hit)
        taken = self._taken() if is_hit else None
        self._recent.append(run_of(number, command))
        return taken

    def _learn(self, program: int, *, is_expected: bool, is_wasted: bool) -> None:
        follower, times = self._followers.get(self._last, (0, 0))
        goes_on = program == follower
        if follower == program and is_expected:
            times = min(times + 1, MOST_CONFIDENT)
        elif times < CONFIDENT or (follower != program and times < 2 * CONFIDENT):
            follower, times = program, 0
        elif follower != program or is_wasted:
            times -= CONFIDENT
        self._followers[self._last] = follower, times
        length = self._lengths.get(self._last, LoopLength())
        self._lengths[self._last] = length.continued() if goes_on else length.ended(begun=program == follower)
        self._last = program
        if is_expected:
            self._exact.add(program)
        else:
            self._exact.discard(program)

    def requested(self, run: Run) -> None:
        """Note a run that was requested, in its complete form."""
        self._recent.append(run)

    @property
    def results(self) -> Iterator[Any]:
        """All results of runs that the client has not requested."""
        return (output for ahead in self._ahead for output in ahead.outputs)

    def __len__(self) -> int:
        return len(self._ahead)

    def runs(self, start: int, count: int) -> list[RunAhead]:
        """Return some of the runs ahead."""
        return list(islice(self._ahead, start, start + count))

    def output_at(self, back: int, position: int, end: int) -> tuple[int, Any] | None:
        """Find a result of a run.

        Args:
            back: Which run: 0 is the last one before ``end``.
            position: Which of its results.
            end: How many runs ahead count; the requested runs are before them.

        Returns:
            Its handle, and its value if the run is ahead; ``None`` if there is no such run or result.
        """
        index = end - 1 - back
        if index >= 0:
            ahead = self._ahead[index]
            return None if position >= len(ahead.outputs) else (ahead.run.outputs[position], ahead.outputs[position])
        if -index > len(self._recent):
            return None
        outputs = self._recent[index].outputs
        return None if position >= len(outputs) else (outputs[position], None)

    def place_of(self, handle: int) -> tuple[int, int] | None:
        """Return how many requested runs ago a value was computed, and which of the results it is."""
        for back, run in enumerate(reversed(self._recent)):
            if handle in run.outputs:
                return back, run.outputs.index(handle)
        return None

    def drop(self) -> None:
        """Drop all runs ahead, because their inputs may have changed."""
        self.shed()
        self._withdraw()

    def _withdraw(self) -> None:
        if self._is_void and self.abroad is not None:
            self.abroad.withdraw()
        self._is_void = False

    def random_state(self) -> torch.Tensor:
        """Return the state of the random numbers as the requested runs have left it."""
        states = (ahead.random for ahead in self._ahead if ahead.random is not None)
        state = next(states, None)
        return self._random.get() if state is None else state.clone()

    def shed(self) -> None:
        """Drop all runs ahead, because memory is short; they run again when they are requested.

        Any thread that holds the memory's lock may call this. Other sessions are informed later.
        """
        state: torch.Tensor | None = None
        self.pinned = 0
        while self._ahead:
            gone = self._ahead.pop()
            state = state if gone.random is None else gone.random
            if gone.undo is not None:
                gone.undo.restore()
            self.misses += gone.exchange is None
            self._is_void |= isinstance(gone.exchange, Send)
        if state is not None:
            self._random.set(state)
        self._forecast.clear()
        self._exchanges.clear()
        self._depends = False

    def _follow(self, ahead: RunAhead) -> None:
        if ahead.exchange is None:
            self._forecast.follow(ahead.run)
        else:
            self._exchanges.follow(ahead.run.program, ahead.exchange)

    @property
    def undo_left_bytes(self) -> int:
        """How many bytes may still be kept because runs ahead overwrite them."""
        return MAX_UNDO_BYTES - sum(ahead.undo.size_bytes for ahead in self._ahead if ahead.undo is not None)

    def is_written_after(self, value: Any, runs: int) -> bool:
        """Whether a run ahead may have written to a value's memory, not counting the first ``runs``."""
        undone = [ahead.undo for ahead in islice(self._ahead, runs, None) if ahead.undo is not None]
        return bool(undone) and isinstance(value, torch.Tensor) and any(
            value.untyped_storage()._cdata in undo.storages for undo in undone)

    def about_to_read(self, value: Any) -> None:
        """Drop all runs ahead if one has written to a value that the client is about to see."""
        if self._ahead and self.is_written_after(value, 0):
            self.drop()

    def freed(self, handles: Iterable[int]) -> None:
        """Drop all runs ahead if one of them may have read a freed value."""
        gone = set(handles)
        if any(not gone.isdisjoint(ahead.run.inputs) for ahead in self._ahead):
            self.drop()

    def forget(self, programs: Iterable[int]) -> None:
        """Forget what follows programs that were dropped or redefined."""
        for program in programs:
            self._followers.pop(program, None)
            self._lengths.pop(program, None)

    @property
    def is_certain(self) -> bool:
        """Whether the same program has followed the last run often enough, and was as predicted the last time.

        Where the last two loops had the same length, a third is expected to have it too: if it ends there, a run more
        would delay what comes after it.
        """
        program, times = self._next()
        return times >= CONFIDENT and program in self._exact and not self._is_at_end(program)

    def _is_at_end(self, program: int) -> bool:
        length = self._lengths.get(self._end)
        return length is not None and length.is_reached(sum(ahead.run.program == program for ahead in self._ahead))

    @property
    def _end(self) -> int:
        return self._ahead[-1].run.program if self._ahead else self._last

    def _next(self) -> tuple[int, int]:
        return self._followers.get(self._end, (0, 0))

    def go(self, value_of: Callable[[int], Any], run: Callable[[Run, list[Any]], RunAhead | None],
           held_bytes: int) -> bool:
        """Run one more program ahead, if the prediction is confident enough.

        Args:
            value_of: Returns the value of a handle, or ``None`` if there is none.
            run: Runs a program on values; returns ``None`` if it cannot run ahead.
            held_bytes: Bytes that the session holds without the runs ahead.

        Returns:
            Whether a program was run.
        """
        before = self._end
        program, _ = self._next()
        self.awaits = False
        self._withdraw()
        if not self.is_certain or not self._has_room(held_bytes):
            return False
        if self._depends and self.abroad is not None and not all(map(self.abroad.is_valid, self._ahead)):
            self.drop()
            return False
        if program < 0:
            return self._exchange(program, value_of)
        if not self.is_repeating and any(ahead.run.program == program for ahead in self._ahead):
            return False
        try:
            expected = self._forecast.expected(program)
        except ProtocolError:
            return False
        inputs = self.values(expected.inputs, value_of)
        if inputs is None:
            return False
        made = run(expected, inputs)
        if made is None:
            self._followers[before] = program, 0
            return False
        self._ahead.append(made)
        self._follow(made)
        return True

    def _exchange(self, number: int, value_of: Callable[[int], Any]) -> bool:
        """Carry out one more exchange ahead; return whether that was possible."""
        command = self._exchanges.expected(number, self._handle_at)
        if command is None or self.abroad is None:
            return False
        if isinstance(command, Receive):
            made = self.abroad.look(command)
            self.awaits = made is None
            if made is None:
                return False
            made = attrs.evolve(made, run=run_of(number, command))
            self._depends = True
        else:
            made = RunAhead(run_of(number, command), [], exchange=command)
            if isinstance(command, Send) and self.values((command.handle,), value_of) is None:
                return False
        self._ahead.append(made)
        self._follow(made)
        return True

    def _handle_at(self, back: int, position: int) -> int | None:
        found = self.output_at(back, position, len(self._ahead))
        return None if found is None else found[0]

    def assumed(self, end: int) -> tuple[Assumed, ...]:
        """Return what the first ``end`` runs ahead assume of other sessions."""
        return merged(one for ahead in islice(self._ahead, end) for one in ahead.assumes) if self._depends else ()

    def _has_room(self, held_bytes: int) -> bool:
        """Whether one more run may be ahead."""
        limit_bytes = max(MIN_RESULT_BYTES, held_bytes // RESULT_SHARE)
        is_few = sum(ahead.new_bytes for ahead in self._ahead) >= limit_bytes
        runs = sum(ahead.exchange is None for ahead in self._ahead)
        return runs < (FEW_AHEAD if is_few else MAX_AHEAD) and len(self._ahead) < MAX_STEPS_AHEAD

    def values(self, handles: Sequence[int], value_of: Callable[[int], Any]) -> list[Any] | None:
        """Return the values of handles as they will be after the runs ahead; ``None`` if there is none for one."""
        made: dict[int, Any] = {}
        for ahead in self._ahead:
            made.update(zip(ahead.run.outputs, ahead.outputs, strict=True))
            made.update(dict.fromkeys(ahead.run.released))
        values = [made[handle] if handle in made else value_of(handle) for handle in handles]
        return None if any(value is None for value in values) else values
