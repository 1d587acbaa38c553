"""How the programs of a session are run: on request, ahead of the request, or not at all once a batch is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch

from djinn.errors import DjinnError, OutOfMemoryError, ProtocolError
from djinn.wire import messages
from djinn.wire.messages import GENERATOR_HANDLE, Poisoned, Run, RunDelta, Warned
from djinn_plugins.common.calls.results import is_value, no_value
from djinn_plugins.common.calls.writes import poison_storage, poison_storages, written_handles
from djinn_plugins.common.kernel_warnings import KernelWarnings, collected
from djinn_plugins.common.kinds.executor import (
    RandomState,
    Report,
    SpareRoom,
    SupportsDrawingAhead,
    SupportsEffectReport,
    SupportsSkippedSteps,
    SupportsSpeculation,
    SupportsUndo,
    Undo,
)
from djinn_plugins.common.kinds.memory import SessionMemory
from djinn_plugins.common.memory.shared_values import unshare
from djinn_plugins.common.memory.tensor_bytes import storage_address_of
from djinn_plugins.common.wire.delta import RunPredictor
from djinn_plugins.executor.program_parts import NO_ROOM, DividedProgram
from djinn_plugins.executor.program_table import DefinedProgram, DefinedPrograms
from djinn_plugins.executor.reports import Failures, RunTime
from djinn_plugins.executor.session_values import SessionValues
from djinn_plugins.executor.speculation import FEW_AHEAD, RunAhead, Speculator
from djinn_plugins.executor.turns import Turns

__all__ = ("ProgramRuns",)


class ProgramRuns:
    """The runs of a session's programs.

    Args:
        programs: The programs.
        values: The session's values.
        memory: Makes inputs ready, and room for results.
        random: The session's random numbers.
        failures: Records failures.
        predictor: Completes delta-encoded runs.
        ahead: Results of runs that have not been requested yet.
        time: Measures how long programs run.
        warnings: Keeps the warnings that kernels give.
        turns: Decides when programs may run; ``None`` for any time.
        spare: Room for values that grow; ``None`` if there is none.
        is_limited: Whether sessions share the memory and its lock, within a limit. Then programs that write to values
            do not run ahead.

    Attributes:
        lent: Addresses of memory that the last answer shares: it is not written before the next batch.
        skipped: Programs skipped because their batch was cancelled.
        unconfirmed: Programs that have run since a value was last fetched: an asynchronous device may not have finished
            them.

    Concurrency:
        One thread at a time, which holds the memory's lock.
    """

    def __init__(
        self, programs: DefinedPrograms, values: SessionValues, memory: SessionMemory, random: RandomState,
        failures: Failures, predictor: RunPredictor, ahead: Speculator, time: RunTime, warnings: KernelWarnings,
        turns: Turns | None, spare: SpareRoom | None = None, *, is_limited: bool,
    ) -> None:
        self._is_limited = is_limited
        self.lent: set[int] = set()
        self._spare = spare
        self._programs = programs
        self._values = values
        self._memory = memory
        self._table = memory.values
        self._random = random
        self._failures = failures
        self._predictor = predictor
        self._ahead = ahead
        self._execute = memory.with_room_to_run(self._executed)
        self._warnings = warnings
        self._turns = turns
        self._in_turn = partial(_named, turns, time) if turns is None or is_limited else partial(_in_turn, turns, time)
        self._turn: Callable[[], AbstractContextManager[None]] = (
            nullcontext if turns is None or not is_limited else partial(_turn_without, memory.lock, turns))
        self.unconfirmed: dict[int, DefinedProgram] = {}
        self._divided: dict[int, DividedProgram] = {}
        """Programs for which there was no room as a whole, by number."""
        self._stop: Sequence[DjinnError] = ()
        self._stopped: Poisoned | None = None
        self.skipped = 0

    def begin_batch(self, stop: Sequence[DjinnError]) -> None:
        """Begin a batch, which is cancelled once ``stop`` has a reason."""
        self._stop, self._stopped = stop, None

    def run(self, command: Run | RunDelta) -> None:
        """Run a program, and add its results to the values."""
        is_stopped = bool(self._stop)
        if is_stopped:
            self._ahead.drop()
        outputs = self._ahead.asked(command)
        try:
            run = self._predictor.complete(command)
        except Exception as error:  # noqa: BLE001  # becomes a failure that the client raises
            self._failures.add(error)
            return
        self._ahead.requested(run)
        known = self._programs.get(run.program)
        if is_stopped:
            outputs = self._skipped(known, run)
        can_divide = known is not None and known.program is not None and len(known.definition.body.steps) > 1
        no_room = self._carried_out(known, run, outputs, can_divide=can_divide)
        if no_room is not None and known is not None:
            self._carry_out_in_parts(known, run, no_room)
        if run.released:
            self._values.free(run.released)

    def forget(self, programs: Iterable[int]) -> None:
        """Forget programs that will not run again."""
        for program in programs:
            self.unconfirmed.pop(program, None)
            self._divided.pop(program, None)

    def _carried_out(self, known: DefinedProgram | None, run: Run, outputs: list[Any] | None = None, *,
                     can_divide: bool = False, whole_error: DjinnError | None = None) -> DjinnError | None:
        """Compute the outputs of a run, if they are not given, and add them to the values.

        Args:
            known: The program.
            run: The run.
            outputs: The outputs, if they were computed.
            can_divide: Whether the program can be divided if there is no room for it.
            whole_error: If it is a part of a program: why there is no room for the whole.

        Returns:
            Why there is no room for a program that can be divided; nothing has changed then.
        """
        before = self._failures.count
        try:
            if outputs is None:
                outputs = self._computed(known, run)
        except Exception as error:  # noqa: BLE001  # as above: the session continues, and the outputs are poisoned
            if isinstance(error, NO_ROOM):
                if can_divide:
                    return error
                # A batch for which there is room at this step may have none at another one.
                error = whole_error if type(error) is type(whole_error) is OutOfMemoryError else error
            outputs = self._skipped(known, run) if error in self._stop else self._failed(known, run, error)
        # Of a program that runs in parts, the outputs were admitted before.
        admitted = len(run.outputs) if run.program < 0 else self._values.admitted(run.outputs)
        if admitted or not outputs:
            outputs = [output if is_value(output) else self._noted(known, run, RuntimeError(no_value("A step", output)))
                       for output in outputs[:admitted]]
            if known is not None and known.program is not None:
                try:
                    self._memory.made(known, run, outputs, is_complete=self._failures.count == before)
                except OutOfMemoryError as error:
                    outputs = [self._noted(known, run, error)] * admitted
            for handle, value in zip(run.outputs[:admitted], outputs, strict=True):
                self._table.put(handle, value)
        return None

    def _carry_out_in_parts(self, whole: DefinedProgram, run: Run, error: DjinnError) -> None:
        """Run a program for which there is no room as a whole, with as many steps at a time as there is room for."""
        divided = self._divided.get(run.program)
        if divided is None:
            divided = self._divided[run.program] = DividedProgram(whole, partial(self._programs.part, whole))
        run = msgspec.structs.replace(run, outputs=run.outputs[:self._values.admitted(run.outputs)])
        try:
            divided.run(run, lambda part, its_run, is_step: self._carried_out(
                part, its_run, can_divide=not is_step, whole_error=error) is None, self._values.free)
        except Exception as failure:  # noqa: BLE001  # as above
            for handle, poison in zip(run.outputs, self._failed(whole, run, failure), strict=False):
                self._table.put(handle, poison)

    def _failed(self, known: DefinedProgram | None, run: Run, error: Exception) -> list[Any]:
        """Return the outputs of a run that could not be made."""
        poison = self._noted(known, run, error)
        if known is not None and len(known.definition.body.steps) > 1 and not isinstance(error, OutOfMemoryError):
            # Of several steps, some would have succeeded and written.
            poison_storages(self._table, written_handles(known.definition.body, run.inputs), poison)
        return [poison] * len(run.outputs)

    def _noted(self, known: DefinedProgram | None, run: Run, error: Exception) -> Poisoned:
        """Record that a run could not be made."""
        if known is None or run.program >= 0:
            return self._failures.add(error, run=run.program)
        body = known.definition.body
        operator = body.templates[body.steps[0].template].operator if len(body.steps) == 1 else ""
        return self._failures.add(error, operator=operator, run=known.definition.program, step=known.begin)

    def _computed(self, known: DefinedProgram | None, run: Run) -> list[Any]:
        """Return the outputs of a run."""
        if known is None:
            raise ProtocolError(f"Program {run.program} was never defined.")
        program, body = known.program, known.definition.body
        if program is None:
            assert known.failed is not None, run.program
            poison_storages(self._table, written_handles(body, run.inputs), known.failed)
            return [known.failed] * len(run.outputs)
        if len(run.inputs) != body.inputs or len(run.outputs) != len(body.keep):
            raise ProtocolError(f"Program {run.program} has {body.inputs} inputs and {len(body.keep)} outputs, the run "
                                f"{len(run.inputs)} and {len(run.outputs)}.")
        if GENERATOR_HANDLE in run.outputs:
            raise ProtocolError("Handle 0 is reserved.")
        with self._turn():
            return self._execute(known, run)

    def _executed(self, known: DefinedProgram, run: Run) -> list[Any]:
        """Run a program on inputs that are ready."""
        program, body = known.program, known.definition.body

        def report(step: int, error: BaseException) -> Poisoned:
            if error in self._stop:
                return self._reason()
            operator = body.templates[body.steps[step].template].operator
            return self._failures.add(error, operator=operator, run=known.definition.program, step=known.begin + step)

        if known.changes_metadata:
            self._values.make_resizable(written_handles(body, run.inputs, metadata=True))
        if self._table.shared_bytes:
            self._note_writes(known, run)
        inputs = [self._values.given(handle) for handle in run.inputs]
        self._make_ready(known, run, inputs)
        before = list(inputs)
        numbers = messages.from_wire(run.numbers)
        self.unconfirmed[run.program] = known
        refused = None if known.checked is None else known.checked.refused(inputs, numbers)
        if refused and len(body.steps) > 1:
            # A part of it may take less at a time.
            raise next(iter(refused.values()))
        if not refused:
            outputs = self._warnings.of(lambda: self._in_turn(
                known, lambda: known.run(self._breaks(known), inputs, numbers, self._random, report)))
        elif isinstance(program, SupportsSkippedSteps):
            outputs = self._warnings.of(lambda: self._in_turn(known, lambda: program.run_without(
                inputs, numbers, self._random, report, refused, self._breaks(known))))
        else:
            rest = self._programs.without(known, refused)
            outputs = self._warnings.of(lambda: self._in_turn(
                rest, lambda: rest.run(self._breaks(rest), inputs, numbers, self._random, report)))
        for given, left in zip(before, inputs, strict=True):
            if isinstance(left, Poisoned) and isinstance(given, torch.Tensor):
                poison_storage(self._table, given, left)
        return outputs

    def _note_writes(self, known: DefinedProgram, run: Run) -> None:
        """Record which values a run writes, and copy those that share memory, unless the system copies its pages."""
        program = known.program
        written = program.effects.written if isinstance(program, SupportsEffectReport) else range(len(run.inputs))
        for position in written:
            self._table.written(run.inputs[position])
            unshare(self._table.get(run.inputs[position]))

    def _make_ready(self, known: DefinedProgram, run: Run, inputs: Sequence[Any]) -> None:
        """Move inputs out of spare room that the program must find as eager lays them out."""
        if self._spare is not None and known.program is not None:
            for position in self._spare.make_ready(known.program, inputs):
                handle = run.inputs[position]
                if self._table.get(handle) is inputs[position]:
                    self._table.put(handle, inputs[position])

    def _skipped(self, known: DefinedProgram | None, run: Run) -> list[Any]:
        """Return the outputs of a cancelled run."""
        self.skipped += 1
        poison = self._reason()
        if known is not None and known.changes_metadata:
            poison_storages(self._table, written_handles(known.definition.body, run.inputs, metadata=True), poison)
        return [poison] * len(run.outputs)

    def _breaks(self, known: DefinedProgram) -> Sequence[BaseException]:
        """Return what a running program looks at between two steps."""
        return self._stop if self._turns is None or not known.can_pause else self._turns.breaks

    def _reason(self) -> Poisoned:
        """Return the poison for everything that a cancelled batch does not compute."""
        if self._stopped is None:
            self._stopped = self._failures.add(self._stop[0])
            # The frames of its traceback refer to tensors.
            self._stop[0].__traceback__ = None
        return self._stopped

    def run_ahead(self) -> bool:
        """Run the program that is most likely to be requested next; return whether there was one."""
        try:
            with self._turn():
                return self._ahead.go(self._table.get, self._computed_ahead, self._table.held_bytes)
        except DjinnError:
            # There are no turns for it any more.
            return False

    def _computed_ahead(self, run: Run, inputs: list[Any]) -> RunAhead | None:
        """Run ahead; return ``None`` if that cannot be done, or would have another effect, a failure or a warning."""
        known = self._programs.get(run.program)
        program = None if known is None else known.program
        numbers = messages.from_wire(run.numbers)
        if known is None or not isinstance(program, SupportsSpeculation):
            return None
        draws = isinstance(program, SupportsDrawingAhead) and not program.is_pure(numbers) and (
            program.only_draws(numbers))
        writes = not (draws or program.is_pure(numbers))
        if (
            (writes and not self._can_undo(program, inputs, numbers))
            or any(isinstance(value, Poisoned) for value in inputs)
            or GENERATOR_HANDLE in run.outputs
            or len(run.inputs) != known.definition.body.inputs
            or len(run.outputs) != len(known.definition.body.keep)
            or not self._memory.begin_run_ahead(run, inputs)
        ):
            return None
        self._make_ready(known, run, inputs)
        if known.checked is not None and known.checked.refused(inputs, numbers):
            return None
        if writes and self._table.shared_bytes:
            self._note_writes(known, run)
        failures, outputs = list[BaseException](), list[Any]()
        given: Mapping[Warned, int] = {}
        state = self._random.get() if draws or writes else None
        undos: list[Undo] = []

        def report(_: int, error: BaseException) -> Poisoned:
            failures.append(error)
            return Poisoned(0)

        def execute() -> list[Any]:
            self.unconfirmed[run.program] = known
            if isinstance(program, SupportsUndo) and writes:
                return self._executed_with_undo(known, program, inputs, numbers, report, undos)
            return known.run(self._breaks(known), inputs, numbers, self._random, report)

        try:
            outputs, given = collected(lambda: self._in_turn(known, execute))
        except Exception as error:  # noqa: BLE001  # not requested yet: the request will fail again and report it
            failures.append(error)
        if not (failures or given):
            new_bytes = self._table.added_bytes(outputs) if len(self._ahead) >= FEW_AHEAD else 0
            repeats = isinstance(program, SupportsEffectReport) and program.effects.repeats
            return RunAhead(run, outputs, new_bytes, state, undos[0] if undos else None, repeats=repeats)
        for undo in undos:
            undo.restore()
        if state is not None:
            self._random.set(state)
        return None

    def _executed_with_undo(
        self, known: DefinedProgram, program: SupportsUndo, inputs: list[Any], numbers: Sequence[Any], report: Report,
        undos: list[Undo],
    ) -> list[Any]:
        """Run a program that writes; append the overwritten values to ``undos``."""
        outputs, undo = program.run_with_undo(
            self._breaks(known), inputs, numbers, self._random, report, self._ahead.undo_left_bytes)
        undos.append(undo)
        return outputs

    def _can_undo(self, program: Any, inputs: Sequence[Any], numbers: Sequence[Any]) -> bool:
        """Whether a run may write to values before it is requested: none of them is being sent."""
        if self._is_limited or not (isinstance(program, SupportsUndo) and program.can_undo(numbers)):
            return False
        written = [value for position, value in enumerate(inputs) if position in program.effects.written]
        return not any(isinstance(value, torch.Tensor) and storage_address_of(value) in self.lent for value in written)


def _in_turn(turns: Turns, time: RunTime, known: DefinedProgram, run: Callable[[], list[Any]]) -> list[Any]:
    turns.begin()
    try:
        return _named(turns, time, known, run)
    finally:
        turns.end()


def _named(turns: Turns | None, time: RunTime, known: DefinedProgram, run: Callable[[], list[Any]]) -> list[Any]:
    if turns is not None:
        turns.program = known.name
    return time.of(run)


@contextmanager
def _turn_without(lock: threading.RLock, turns: Turns) -> Iterator[None]:
    """Wait for a turn without a lock that is held once: sessions that share it wait for their turns at the same time.

    Otherwise their turns would follow one another as they get the lock, and a worker would give its turn at the device
    back after each program, since no other session could wait for the next one.
    """
    lock.release()
    try:
        turns.begin()
    finally:
        lock.acquire()
    try:
        yield
    finally:
        turns.end()
