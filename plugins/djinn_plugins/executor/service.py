"""How the executor's side processes a batch: the command loop of one session, and the parts that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import torch

from djinn.errors import DjinnError, OutOfMemoryError
from djinn.wire.messages import (
    Batch,
    Command,
    Copy,
    Define,
    Forget,
    Free,
    Peer,
    Receive,
    Result,
    Run,
    RunDelta,
    Seed,
    Send,
    Upload,
    UploadByDigest,
)
from djinn_plugins.common.kernel_warnings import KernelWarnings
from djinn_plugins.common.kinds.executor import Executor, RandomState, SupportsGrowth
from djinn_plugins.common.kinds.guard import ProgramChecker
from djinn_plugins.common.kinds.memory import MemoryManager, SessionMemory
from djinn_plugins.common.memory.tensor_bytes import storage_address_of
from djinn_plugins.common.operators.stated_roles import state_into
from djinn_plugins.common.wire.delta import RunPredictor
from djinn_plugins.executor.content_store import Contents
from djinn_plugins.executor.early_answers import EarlyAnswers, EarlyChannel
from djinn_plugins.executor.peer_exchange import Post
from djinn_plugins.executor.peer_values import PeerValues
from djinn_plugins.executor.program_runs import ProgramRuns
from djinn_plugins.executor.program_table import DefinedPrograms
from djinn_plugins.executor.reports import Failures, RunTime
from djinn_plugins.executor.session_values import SessionValues
from djinn_plugins.executor.speculation import Speculator
from djinn_plugins.executor.timings import Timings
from djinn_plugins.executor.turns import Allowance, Turns
from djinn_plugins.executor.value_checks import value_checks_of

__all__ = ("SessionService",)


class SessionService:
    """One session on the executor's side.

    A batch never raises and never stops halfway. Every error becomes a `Failure`, and the affected results are
    poisoned, so that every later use of them reports the same failure.

    Args:
        executor: Runs the programs.
        seed: Seed of the session's random numbers.
        travels: Whether tensors come from and go to another process: the caller of `handle` gives up its tensors, and
            only reads the returned ones, before the next batch.
        contents: Keeps uploads, if they should be kept; it then owns the tensors passed to `handle`.
        allowance: Limits what the session may request; ``None`` for no limits.
        post: Exchanges values with other sessions.
        watch: Checks programs before they run; none if the client is this process itself.
        turns: Decides when programs may run; ``None`` for any time.
        manager: Keeps the values of several sessions within a memory limit; ``None`` for no limit.

    Attributes:
        memory: The memory of the session's values, and the values.
        ahead: Results of runs that the client has not requested yet.
        early: Answers batches before they are received; ``None`` if the client does not want that.

    Concurrency:
        One batch at a time; any thread may read `held_bytes`.
    """

    def __init__(self, executor: Executor, *, seed: int = 0, travels: bool = False,
                 contents: Contents | None = None, post: Post | None = None,
                 allowance: Allowance | None = None, watch: ProgramChecker | None = None, turns: Turns | None = None,
                 manager: MemoryManager | None = None) -> None:
        self._random = executor.random_state(seed)
        self._predictor = RunPredictor()
        self.ahead = Speculator(self._predictor, self._random)
        random = _RequestedRandom(self._random, self.ahead)
        self.early: EarlyAnswers | None = None
        self._is_limited = manager is not None
        self.memory = SessionMemory() if manager is None else manager.join(self._random, self.ahead, contents)
        self._failures = Failures(self.memory.explain)
        self._warnings = KernelWarnings()
        self._run_time = RunTime(executor, self._failures.attempt)
        self._new_timings = partial(Timings, executor, self._failures.attempt)
        # With a limit, storages are moved and computed again one by one, so each holds one value and no more.
        spare = executor.spare_room() if manager is None and isinstance(executor, SupportsGrowth) else None
        self._values = SessionValues(executor, self.memory, random, self._failures, travels=travels,
                                     contents=contents, allowance=allowance, spare=spare,
                                     about_to_read=self.ahead.about_to_read, turns=turns)
        self._programs = DefinedPrograms(executor, self._failures, allowance, watch, spare)
        self._runs = ProgramRuns(self._programs, self._values, self.memory, self._random, self._failures,
                                 self._predictor, self.ahead, self._run_time, self._warnings, turns, spare,
                                 is_limited=self._is_limited)
        self._peers = PeerValues(post, self._values, self.memory, random, self._failures, self.ahead)
        self._lock, self._release = self.memory.lock, self.memory.release
        self._uploads: Iterator[torch.Tensor] = iter(())
        """Tensors of the current batch that no command has taken yet."""
        self._here: Mapping[type, Callable[[Any], None]] = {
            Run: self._runs.run, RunDelta: self._runs.run, Free: self._free, Copy: self._copy, Upload: self._upload,
            UploadByDigest: self._recall, Define: self._define, Forget: self._forget, Seed: self._seed}
        self._elsewhere: Mapping[type, Callable[[Any], None]] = {
            Send: self._peers.send, Receive: self._peers.receive, Peer: self._peers.connect}
        """Commands that other sessions take part in."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the values' storages, without those whose memory is shared."""
        return self.memory.values.own_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the values' storages in memory that others read, too: of kept uploads, and of stored models."""
        return self.memory.values.shared_bytes

    @property
    def live_handles(self) -> int:
        """Number of values held."""
        return len(self.memory.values)

    @property
    def runs_ahead(self) -> tuple[int, int]:
        """Number of runs that had run ahead when requested, and of runs ahead that were never requested."""
        return self.ahead.hits, self.ahead.misses

    @property
    def skipped(self) -> int:
        """Programs skipped because their results were no longer needed."""
        return self._runs.skipped

    def suspects(self) -> list[str]:
        """Return operators that check values, and that an asynchronous device may not have finished."""
        return value_checks_of(known.body for known in self._runs.unconfirmed.values())

    def answer_early(self, channel: EarlyChannel) -> None:
        """Send values that the client will fetch over a channel as soon as they are known."""
        self.early = EarlyAnswers(self.ahead, channel, self._ready_value, self._values.read, self._is_quiet,
                                  self._run_time.take, self._peers.begin_ahead(), may_shed=self._is_limited)

    def _ready_value(self, handle: int) -> Any:
        try:
            self.memory.use((handle,))
        except OutOfMemoryError:
            return None
        return self.memory.values.get(handle)

    def _is_quiet(self) -> bool:
        # Timings can wait for an answer that is asked for.
        return not self._failures.pending and not self._warnings.pending

    def close(self, keeping: Collection[int] = ()) -> None:
        """Drop all values and programs of the session.

        Args:
            keeping: Values that stay. Then the memory stays as well, and the caller closes it.
        """
        with self.memory.lock:
            # What has run ahead may have written to values that stay.
            self.ahead.drop()
            self._values.clear(keeping)
            self._programs.clear()
            self.memory.release()
        if not keeping:
            self.memory.close()

    def handle(
        self, batch: Batch, tensors: Sequence[torch.Tensor], stop: Sequence[DjinnError] = (), number: int = 0
    ) -> tuple[Result, list[torch.Tensor]]:
        """Execute a batch.

        Args:
            batch: A decoded batch.
            tensors: One CPU tensor per upload.
            stop: Empty as long as the batch's results are needed. Any thread may add a reason to stop: after that, no
                program and no further step of the running program starts. The results carry that reason, as one
                failure. Values that would have been written in place stay unchanged, unless their metadata would have
                changed. All other commands are still executed.
            number: Number of the batch.

        Returns:
            The answer (to be sent only if the batch wants one) and its tensors.
        """
        given = None if self.early is None else self.early.begin(number, batch)
        if not stop:
            # The client may lack answers that came before a cancelled batch.
            self._runs.lent.clear()
        self._uploads = iter(tensors)
        state_into(self.memory if self._is_limited else None)
        self._runs.begin_batch(stop)
        self._run_time.is_wanted |= batch.metered
        if batch.timed and self._run_time.timings is None:
            self._run_time.timings = self._new_timings()
        timings = self._run_time.timings
        if timings is None:
            for command in batch.commands:
                self._carry_out(command)
        else:
            for command in batch.commands:
                begin_ns = monotonic_ns()
                self._carry_out(command)
                if batch.settled and isinstance(command, (Run, RunDelta)):
                    self._run_time.settle()
                timings.add(command, begin_ns)
        # The iterator would keep the batch's tensors until the next batch.
        self._uploads = iter(())
        # The failures of a batch that was answered early are reported with the next answer.
        answer = given or (self._answer(batch) if batch.wants_reply else (Result(), []))
        if self.early is not None:
            self.early.end(batch)
        self.memory.settle()
        return answer

    def _carry_out(self, command: Command) -> None:
        """Carry out a command. The memory's lock is held, except while the session waits for another, or for a turn."""
        carry_out = self._here.get(type(command))
        if carry_out is None:
            self._elsewhere[type(command)](command)
            return
        with self._lock:
            carry_out(command)
            self._release()

    def _free(self, command: Free) -> None:
        self.ahead.exchanged(command)
        self._values.free(command.handles)

    def _copy(self, command: Copy) -> None:
        self.ahead.freed(target for _, target, _ in command.handles)
        self._values.copy(command)

    def _upload(self, command: Upload) -> None:
        self.ahead.drop()
        self._values.upload(command, next(self._uploads))

    def _recall(self, command: UploadByDigest) -> None:
        self.ahead.drop()
        self._values.recall(command)

    def _define(self, command: Define) -> None:
        self.ahead.drop()
        self._programs.define(command)

    def _forget(self, command: Forget) -> None:
        self.ahead.drop()
        self._predictor.forget(command.programs)
        self.ahead.forget(command.programs)
        self._programs.forget(command.programs)
        self._runs.forget(command.programs)

    def _seed(self, command: Seed) -> None:
        self.ahead.drop()
        self._failures.attempt(lambda: self._random.seed(command.seed))

    def later_values(self, batch: Batch) -> tuple[Result, list[torch.Tensor]]:
        """Return the values that the client of an executed batch asked for without waiting, and their tensors."""
        data: list[torch.Tensor] = []
        items = tuple([self._values.fetch(handle, data) for handle in batch.later])
        self._runs.lent.update(map(storage_address_of, data))
        return Result(items, is_later=True), data

    def _answer(self, batch: Batch) -> tuple[Result, list[torch.Tensor]]:
        data: list[torch.Tensor] = []
        items = [*(self._values.fetch(handle, data) for handle in batch.fetch),
                 *map(self._values.describe, batch.describe)]
        self._runs.lent.update(map(storage_address_of, data))
        if batch.synchronize and not items:
            self._run_time.settle()
        result = Result(tuple(items), self._failures.take(), run_ns=self._run_time.take(),
                        warnings=self._warnings.take())
        if batch.fetch and not result.failures:
            self._runs.unconfirmed.clear()
        timings = self._run_time.timings
        return (result if timings is None else timings.added_to(result, waits=batch.synchronize)), data

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next request can be predicted with confidence, and there is room for it."""
        return self.ahead.is_certain and self.memory.has_room_ahead()

    def look_ahead(self) -> bool:
        """Run one more program that is likely to be requested next. Call this only while no batch is waiting.

        Returns:
            Whether a program was run; ``False`` means that there is none to run.
        """
        with self.memory.lock:
            try:
                went = self._runs.run_ahead()
                if self.early is not None:
                    # Also if nothing ran: what is ahead may suffice for a batch that is expected only now.
                    self.early.give()
                return went
            finally:
                self.memory.release()


class _RequestedRandom:
    """The random numbers as the requested runs have left them.

    See `djinn_plugins.common.kinds.executor.RandomState`.
    """

    def __init__(self, random: RandomState, ahead: Speculator) -> None:
        self._random = random
        self._ahead = ahead

    def seed(self, seed: int) -> None:
        """Restart from ``seed``."""
        self._ahead.drop()
        self._random.seed(seed)

    def get(self) -> torch.Tensor:
        """Return the state."""
        return self._ahead.random_state()

    def set(self, state: torch.Tensor) -> None:
        """Continue from a state."""
        self._ahead.drop()
        self._random.set(state)
