"""How the executor's side processes a batch: the values, programs and failures of one session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from djinn.errors import DjinnError, LimitError, PeerError, ProtocolError, UnknownHandleError
from djinn.wire import messages
from djinn.wire.messages import (
    GENERATOR_HANDLE,
    Batch,
    Command,
    Copy,
    Define,
    Failure,
    Forget,
    Free,
    Item,
    Parcel,
    Peer,
    Plain,
    Poisoned,
    Recall,
    Receive,
    Rerun,
    Result,
    Run,
    Seed,
    Send,
    Upload,
)
from djinn.wire.tensors import header_of
from djinn_lib_service import transfers as parcels
from djinn_lib_service.capabilities import Allowance, SharingExecutor, SupportsSkippedSteps, SupportsSpeculation, Turns
from djinn_lib_service.content_store import Contents
from djinn_lib_service.delta import RunPredictor
from djinn_lib_service.handle_table import HandleTable
from djinn_lib_service.kinds import Executor, Watch
from djinn_lib_service.known import KnownProgram, made_ready
from djinn_lib_service.peer_exchange import Post
from djinn_lib_service.program_check import check_program
from djinn_lib_service.reports import Failures, RunTime, Timings
from djinn_lib_service.speculation import Speculator
from djinn_lib_service.tensor_bytes import copy_of, describe, placed_in
from djinn_lib_service.writes import poison_storage, poison_storages, written_handles

MAX_TOLD = 16
"""Most failures sent along with a parcel."""


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

    Attributes:
        skipped: Programs skipped because their results were no longer needed.

    Concurrency:
        One batch at a time; any thread may read `held_bytes`.
    """

    def __init__(self, executor: Executor, *, seed: int = 0, travels: bool = False,
                 contents: Contents | None = None, post: Post | None = None,
                 allowance: Allowance | None = None, watch: Watch | None = None, turns: Turns | None = None) -> None:
        self._executor = executor
        self._turns = turns
        self._allowance = allowance
        self._not_admitted: Poisoned | None = None
        self._contents = contents
        self._post = post
        self._watch = watch
        shared = executor if travels and isinstance(executor, SharingExecutor) else None
        # Nothing may write to kept contents, so the value must be a copy.
        self._put = executor.put if shared is None or contents is not None else shared.adopt
        self._adopt = executor.put if shared is None else shared.adopt
        self._get = executor.get if shared is None else shared.lend
        self._random = executor.random_state(seed)
        self._values = HandleTable()
        self._programs: dict[int, KnownProgram] = {}
        self._forecast = RunPredictor()
        self._lookahead = Speculator(self._forecast)
        self._failures = Failures()
        self._fail = self._failures.add
        self._timings: Timings | None = None
        self._stop: Sequence[DjinnError] = ()
        self._stopped: Poisoned | None = None
        self._run_time = RunTime(executor, self._attempt)
        self.skipped = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the values' storages."""
        return self._values.held_bytes

    @property
    def live_handles(self) -> int:
        """Number of values held."""
        return len(self._values)

    def close(self) -> None:
        """Drop all values and programs of the session."""
        self._values.clear()
        self._programs.clear()
        self._lookahead.drop()
        if self._contents is not None:
            self._contents.close()

    @property
    def runs_ahead(self) -> tuple[int, int]:
        """Number of runs that had run ahead when requested, and of runs ahead that were never requested."""
        return self._lookahead.hits, self._lookahead.misses

    def handle(
        self, batch: Batch, tensors: Sequence[torch.Tensor], stop: Sequence[DjinnError] = ()
    ) -> tuple[Result, list[torch.Tensor]]:
        """Execute a batch.

        Args:
            batch: A decoded batch.
            tensors: One CPU tensor per upload.
            stop: Empty as long as the batch's results are needed. Any thread may add a reason to stop: after that, no
                program and no further step of the running program starts. The results carry that reason, as one
                failure. Values that would have been written in place stay unchanged, unless their metadata would have
                changed. All other commands are still executed.

        Returns:
            The answer (to be sent only if the batch wants one) and its tensors.
        """
        uploads = iter(tensors)
        self._stop, self._stopped = stop, None
        self._run_time.is_wanted |= batch.metered
        if batch.timed and self._timings is None:
            self._timings = Timings()
        if self._timings is None:
            for command in batch.commands:
                self._carry_out(command, uploads)
        else:
            for command in batch.commands:
                begin_ns = time.monotonic_ns()
                self._carry_out(command, uploads)
                self._timings.add(command, begin_ns)
        if not batch.wants_reply:
            return Result(), []
        data: list[torch.Tensor] = []
        items = [*(self._fetch(handle, data) for handle in batch.fetch), *map(self._describe, batch.describe)]
        result = Result(tuple(items), self._failures.take(), run_ns=self._run_time.take())
        return (result if self._timings is None else self._timings.added_to(result)), data

    def _carry_out(self, command: Command, uploads: Iterator[torch.Tensor]) -> None:
        if isinstance(command, (Run, Rerun)):
            self._run(command)
        elif isinstance(command, Free):
            self._lookahead.freed(command.handles)
            self._free(command.handles)
        elif isinstance(command, Copy):
            self._lookahead.freed(target for _, target, _ in command.handles)
            self._copy(command)
        elif isinstance(command, Send):
            self._send(command)
        elif isinstance(command, Peer):
            self._attempt(lambda: self._posted().connect(command.peer, command.address, command.mailbox))
        else:
            self._lookahead.drop()
            self._change(command, uploads)

    def _change(
        self, command: Upload | Recall | Receive | Define | Seed | Forget, uploads: Iterator[torch.Tensor]
    ) -> None:
        if isinstance(command, Upload):
            self._upload(command, next(uploads))
        elif isinstance(command, Recall):
            self._recall(command)
        elif isinstance(command, Receive):
            self._receive(command)
        elif isinstance(command, Define):
            self._define(command)
        elif isinstance(command, Seed):
            self._attempt(lambda: self._random.seed(command.seed))
        else:
            self._forecast.forget(command.programs)
            for program in command.programs:
                self._lookahead.forget(program)
                self._programs.pop(program, None)

    def _attempt(self, action: Any) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001  # becomes a failure that the client raises
            # Any exception from an executor must reach the client as a failure; it must not end the whole session.
            return self._fail(error)

    def _admits(self, handles: Sequence[int]) -> bool:
        """Whether values may be added. If not, they are not even stored as poisoned, which would use memory too."""
        if self._allowance is not None:
            try:
                self._allowance.admit_values(len(self._values), len(handles))
            except LimitError as error:
                self._not_admitted = self._fail(error)
                self._free(handles)
                return False
        return True

    def _define(self, command: Define) -> None:
        made = self._attempt(lambda: self._prepare(command))
        self._programs[command.program] = KnownProgram(command, failed=made) if isinstance(made, Poisoned) else made

    def _prepare(self, command: Define) -> KnownProgram:
        if self._allowance is not None:
            self._allowance.admit_program(command.body)
        check_program(command.body)
        checked = None if self._watch is None else self._watch.check(command.body)
        return made_ready(command, checked, self._executor)

    def _upload(self, command: Upload, tensor: torch.Tensor) -> None:
        if command.handle == GENERATOR_HANDLE:
            self._attempt(lambda: self._random.set(tensor))
        elif self._admits((command.handle,)):
            self._values.put(command.handle, self._attempt(lambda: self._put(tensor)))
            if self._contents is not None:
                self._contents.keep(command.handle, tensor)

    def _recall(self, command: Recall) -> None:
        contents, handle = self._contents, command.handle
        if handle == GENERATOR_HANDLE:
            self._fail(ProtocolError("Handle 0 is reserved."))
        elif not self._admits((handle,)):
            return
        elif contents is None:
            self._values.put(handle, self._fail(ProtocolError("Nothing is kept for this session.")))
        else:
            self._values.put(handle, self._attempt(lambda: self._put(contents.recall(handle, command.digest))))

    def _posted(self) -> Post:
        if self._post is None:
            raise PeerError("This session exchanges no values with others.", hint="Bring the value home instead.")
        return self._post

    def _send(self, command: Send) -> None:
        def post_it() -> None:
            post = self._posted()
            packed = self._attempt(lambda: self._packed(command, post.session))
            if isinstance(packed, Poisoned):
                packed = Parcel(command.parcel, failure=self._failures.told_to_others(packed, post.session)), ()
            parcel, tensors = packed
            # The receiver of the value also gets the failures that happened before it was sent.
            pending = self._failures.pending[:MAX_TOLD]
            told = tuple(self._failures.of_others(failure, post.session) for failure in pending)
            post.send(command.peer, msgspec.structs.replace(parcel, told=told) if told else parcel, tensors)

        self._attempt(post_it)

    def _packed(self, command: Send, session: str) -> tuple[Parcel, Sequence[torch.Tensor]] | Poisoned:
        if command.handle == GENERATOR_HANDLE:
            return parcels.pack(command.parcel, self._random.get(), lambda state: state)
        value = self._value(command.handle)
        if not command.family or not isinstance(value, torch.Tensor):
            return value if isinstance(value, Poisoned) else parcels.pack(command.parcel, value, self._get)
        family = [self._value(handle) for handle in command.family]
        return parcels.pack_family(command.parcel, [
            self._failures.told_to_others(member, session) if isinstance(member, Poisoned) else member
            for member in family], self._get)

    def _receive(self, command: Receive) -> None:
        self._accept(command, self._attempt(lambda: self._posted().receive(command.sender, command.parcel)))

    def _accept(self, command: Receive, arrived: tuple[Parcel, Sequence[torch.Tensor]] | Poisoned) -> None:
        values = arrived if isinstance(arrived, Poisoned) else self._attempt(lambda: self._unpacked(command, *arrived))
        handles = command.family or (command.handle,)
        if isinstance(values, Poisoned) or len(values) != len(handles):
            poison = values if isinstance(values, Poisoned) else self._fail(
                ProtocolError(f"A parcel of {len(values)} values where {len(handles)} were expected."))
            values = [poison] * len(handles)
        if command.handle == GENERATOR_HANDLE:
            if not isinstance(values[0], Poisoned):
                self._attempt(lambda: self._random.set(values[0]))
            return
        if self._admits(handles):
            for handle, value in zip(handles, values, strict=True):
                self._values.put(handle, value)

    def _unpacked(
        self, command: Receive, parcel: Parcel, tensors: Sequence[torch.Tensor]
    ) -> list[Any] | Poisoned:
        for failure in parcel.told:
            self._failures.adopt(failure)
        if parcel.failure is not None:
            return self._failures.adopt(parcel.failure)
        if isinstance(parcel.item, Plain):
            return [messages.from_wire(parcel.item.value)]
        if command.handle == GENERATOR_HANDLE:
            return [tensors[0]]
        if parcel.members:
            return [self._failures.adopt(made) if isinstance(made, Failure) else made
                    for made in parcels.unpack_family(parcel, tensors[0], self._adopt)]
        return [parcels.unpack(parcel, tensors[0], self._adopt)]

    def _free(self, handles: Sequence[int]) -> None:
        self._values.drop(handles)
        if self._contents is not None:
            self._contents.release(handles)

    def _copy(self, command: Copy) -> None:
        copied: dict[int, torch.UntypedStorage] = {}

        def made(source: int, base: int) -> Any:
            value, owner = self._value(source), self._value(base) if base else None
            if isinstance(owner, Poisoned) or not isinstance(value, torch.Tensor):
                return owner if isinstance(owner, Poisoned) else value
            storage = value.untyped_storage()
            if owner is None:
                if storage._cdata not in copied:
                    copied[storage._cdata] = copy_of(storage)
                return placed_in(copied[storage._cdata], value)
            if not isinstance(owner, torch.Tensor) or owner.untyped_storage().nbytes() != storage.nbytes():
                raise ProtocolError(f"Value {source} is no view of anything like value {base}.")
            return placed_in(owner.untyped_storage(), value)

        if not self._admits([target for _, target, _ in command.handles]):
            return
        for source, target, base in command.handles:
            if target == GENERATOR_HANDLE:
                self._fail(ProtocolError("Handle 0 is reserved."))
            else:
                self._values.put(target, self._attempt(partial(made, source, base)))

    def _run(self, command: Run | Rerun) -> None:
        ahead = self._lookahead.asked(command)
        run = self._attempt(lambda: self._forecast.complete(command))
        if isinstance(run, Poisoned):
            return
        try:
            outputs = self._skipped(run) if self._stop else self._outputs_of(run) if ahead is None else ahead
        except Exception as error:  # noqa: BLE001  # becomes a failure that the client raises
            # As above: the session continues, and the outputs are poisoned.
            is_wanted = error not in self._stop
            outputs = [self._fail(error, run=run.program)] * len(run.outputs) if is_wanted else self._skipped(run)
        self._take_in(run, outputs)
        if run.released:
            self._free(run.released)

    def _take_in(self, run: Run, outputs: Sequence[Any]) -> None:
        if self._admits(run.outputs):
            for handle, value in zip(run.outputs, outputs, strict=True):
                self._values.put(handle, value)

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next request can be predicted with confidence."""
        return self._lookahead.is_certain

    def look_ahead(self) -> bool:
        """Run one more program that is likely to be requested next. Call this only while no batch is waiting.

        Returns:
            Whether a program was run; ``False`` means that there is none to run.
        """
        return self._lookahead.go(self._values.get, self._run_ahead)

    def _run_ahead(self, run: Run, inputs: list[Any]) -> list[Any] | None:
        known = self._programs.get(run.program)
        program = None if known is None else known.program
        numbers = messages.from_wire(run.numbers)
        if (
            known is None
            or not isinstance(program, SupportsSpeculation)
            or not program.is_pure(numbers)
            or any(isinstance(value, Poisoned) for value in inputs)
            or GENERATOR_HANDLE in run.outputs
            or len(run.inputs) != known.definition.body.inputs
            or len(run.outputs) != len(known.definition.body.keep)
            or (known.checked is not None and known.checked.refused(inputs, numbers))
        ):
            return None
        failures = []

        def report(_: int, error: BaseException) -> Poisoned:
            failures.append(error)
            return Poisoned(0)

        try:
            outputs = self._in_turn(lambda: known.run(self._stop, inputs, numbers, self._random, report))
        except Exception as error:  # noqa: BLE001  # not requested yet: the request will fail again and report it
            failures.append(error)
        return None if failures else outputs

    def _outputs_of(self, run: Run) -> list[Any]:
        known = self._programs.get(run.program)
        if known is None:
            raise ProtocolError(f"Program {run.program} was never defined.")
        program, body = known.program, known.definition.body
        if program is None:
            assert known.failed is not None, run.program
            return self._not_run(run, known.failed)
        if len(run.inputs) != body.inputs or len(run.outputs) != len(body.keep):
            raise ProtocolError(f"Program {run.program} has {body.inputs} inputs and {len(body.keep)} outputs, the run "
                                f"{len(run.inputs)} and {len(run.outputs)}.")
        if GENERATOR_HANDLE in run.outputs:
            raise ProtocolError("Handle 0 is reserved.")

        def report(step: int, error: BaseException) -> Poisoned:
            if error in self._stop:
                return self._reason()
            operator = body.templates[body.steps[step].template].operator
            return self._fail(error, operator=operator, run=run.program, step=step)

        inputs = [self._value(handle) for handle in run.inputs]
        before = list(inputs)
        numbers = messages.from_wire(run.numbers)
        refused = None if known.checked is None else known.checked.refused(inputs, numbers)
        if not refused:
            outputs = self._in_turn(lambda: known.run(self._stop, inputs, numbers, self._random, report))
        elif isinstance(program, SupportsSkippedSteps):
            outputs = self._in_turn(
                lambda: program.run_without(inputs, numbers, self._random, report, refused, self._stop))
        else:
            raise next(iter(refused.values()))
        for given, left in zip(before, inputs, strict=True):
            if isinstance(left, Poisoned) and isinstance(given, torch.Tensor):
                poison_storage(self._values, given, left)
        return outputs

    def _not_run(self, run: Run, poison: Poisoned) -> list[Any]:
        """Poison the outputs of a run that failed as a whole, and the values that it should have written."""
        known = self._programs.get(run.program)
        if known is not None:
            poison_storages(self._values, written_handles(known.definition.body, run.inputs), poison)
        return [poison] * len(run.outputs)

    def _skipped(self, run: Run) -> list[Any]:
        """Return the outputs of a cancelled run."""
        self._lookahead.drop()
        self.skipped += 1
        poison = self._reason()
        known = self._programs.get(run.program)
        if known is not None and known.changes_metadata:
            poison_storages(self._values, written_handles(known.definition.body, run.inputs, metadata=True), poison)
        return [poison] * len(run.outputs)

    def _reason(self) -> Poisoned:
        """Return the poison for everything that a cancelled batch does not compute."""
        if self._stopped is None:
            self._stopped = self._fail(self._stop[0])
            # The frames of its traceback refer to tensors.
            self._stop[0].__traceback__ = None
        return self._stopped

    def _in_turn(self, run: Callable[[], list[Any]]) -> list[Any]:
        if self._turns is None:
            return self._run_time.of(run)
        self._turns.begin()
        try:
            return self._run_time.of(run)
        finally:
            self._turns.end()

    def _value(self, handle: int) -> Any:
        try:
            return self._values[handle]
        except KeyError:
            return self._not_admitted or self._fail(_unknown(handle))

    def _held(self, handle: int) -> Any:
        return self._attempt(self._random.get) if handle == GENERATOR_HANDLE else self._value(handle)

    def _fetch(self, handle: int, data: list[torch.Tensor]) -> Item:
        if self._contents is not None and handle in (messages.MARKS_HANDLE, messages.DIGESTS_HANDLE):
            value = self._attempt(self._contents.marks if handle == messages.MARKS_HANDLE else self._contents.digests)
        else:
            value = self._held(handle)
            if isinstance(value, torch.Tensor) and handle != GENERATOR_HANDLE:
                value = self._attempt(lambda: self._get(value))
        if isinstance(value, Poisoned):
            return value
        if not isinstance(value, torch.Tensor):
            return Plain(messages.to_wire(value))
        item = self._attempt(lambda: header_of(value))
        if not isinstance(item, Poisoned):
            data.append(value)
        return item  # type: ignore[no-any-return]  # `_attempt` is untyped on purpose: it forwards any result

    def _describe(self, handle: int) -> Item:
        value = self._value(handle)
        if isinstance(value, Poisoned):
            return value
        if not isinstance(value, torch.Tensor):
            return Plain(messages.to_wire(value))
        return self._attempt(lambda: describe(value))  # type: ignore[no-any-return]  # as above


def _unknown(handle: int) -> UnknownHandleError:
    return UnknownHandleError(f"The executor holds no value {handle} for this session.")
