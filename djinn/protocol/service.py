"""What the executor's side does with a batch: the table of one session's values, programs and failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from djinn.errors import ProtocolError, UnknownHandleError, UnknownOperatorError
from djinn.kinds.executor import CompiledProgram, Executor, RandomState, Report
from djinn.kinds.guard import CallCheck, CheckedProgram, Watch
from djinn.model.program import Program
from djinn.protocol import failures, messages
from djinn.protocol.contents import Contents
from djinn.protocol.forecast import Forecast
from djinn.protocol.lookahead import Lookahead
from djinn.protocol.messages import (
    DIGESTS_HANDLE,
    GENERATOR_HANDLE,
    MARKS_HANDLE,
    Batch,
    Define,
    Failure,
    Forget,
    Free,
    Item,
    Plain,
    Poisoned,
    Recall,
    Rerun,
    Result,
    Run,
    Seed,
    Upload,
)
from djinn.protocol.tensors import describe, header_of

MAX_FAILURES = 1000
"""Failures remembered between two answers; later ones are counted with the last."""


@runtime_checkable
class SharingExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: ways without the copy, where memory can be shared."""

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a CPU tensor on the device.

        Ownership:
            Nobody else holds the argument: it may become the value.
        """

    def lend(self, value: torch.Tensor) -> torch.Tensor:
        """Give a dense CPU tensor of a value.

        Ownership:
            The result is only read, and only until the session's next batch: it may share the value's memory.
        """


@runtime_checkable
class EarlyProgram(CompiledProgram, Protocol):
    """What a compiled program may have beside the methods of `CompiledProgram`: it may run before it is asked for."""

    def is_pure(self, numbers: Sequence[Any]) -> bool:
        """Whether all that comes of a run with these numbers are its results.

        Laws:
            executor.purity_true
        """


@runtime_checkable
class CheckingExecutor(Protocol):
    """What an executor may have beside the methods of `Executor`: it asks before it makes a call."""

    def compile_checked(self, program: Program, checks: Mapping[int, CallCheck]) -> CompiledProgram:
        """Prepare a checked program, as `Executor.compile` does.

        Args:
            program: The program.
            checks: By template: to be called with the arguments of each of its calls right before the call; if that
                raises, so has the step.
        """


@runtime_checkable
class PartialProgram(CompiledProgram, Protocol):
    """What a compiled program may have beside the methods of `CompiledProgram`: it may run but for some steps."""

    def run_without(
        self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        refused: Mapping[int, Exception],
    ) -> list[Any]:
        """Run once as `CompiledProgram.run` does, as if some steps had raised.

        Args:
            inputs: As for `CompiledProgram.run`, like the next three.
            numbers: The lifted numbers.
            random: The session's random numbers.
            report: Called for a step that raises.
            refused: By position: the steps that are not made, and what they raise instead.
        """


@attrs.frozen
class _Known:
    """A program that was defined: made ready to run, and what was found when it was checked; or why it cannot run."""

    definition: Define
    program: CompiledProgram | None = None
    checked: CheckedProgram | None = None
    failed: Poisoned | None = None


class SessionService:
    """One session on the executor's side.

    A batch never raises and never stops halfway: whatever goes wrong becomes a `Failure`, and the values that should
    have come of it are poisoned, so that every later use of them reports the same failure.

    Args:
        executor: Runs the programs.
        seed: Seed of the session's random numbers.
        travels: Tensors come from and go to another process: nobody else holds those given to `handle`, and those that
            it returns are only read, before the next batch.
        contents: Keeps what is uploaded, if it is to be kept; then the tensors given to `handle` become its own.
        watch: Checks programs before they run; none where the client is this process itself.

    Concurrency:
        One batch at a time.
    """

    def __init__(self, executor: Executor, *, seed: int = 0, travels: bool = False,
                 contents: Contents | None = None, watch: Watch | None = None) -> None:
        self._executor = executor
        self._contents = contents
        self._watch = watch
        shared = executor if travels and isinstance(executor, SharingExecutor) else None
        # What is kept is nobody's to write to: then the value is a copy.
        self._put = executor.put if shared is None or contents is not None else shared.adopt
        self._get = executor.get if shared is None else shared.lend
        self._random = executor.random_state(seed)
        self._values: dict[int, Any] = {}
        self._programs: dict[int, _Known] = {}
        self._forecast = Forecast()
        self._lookahead = Lookahead(self._forecast)
        self._failures: list[Failure] = []
        self._last_failure = 0

    @property
    def live_handles(self) -> int:
        """Number of values held."""
        return len(self._values)

    def close(self) -> None:
        """Drop everything the session holds."""
        self._values.clear()
        self._programs.clear()
        self._lookahead.drop()
        if self._contents is not None:
            self._contents.close()

    @property
    def runs_ahead(self) -> tuple[int, int]:
        """Runs that had been run ahead when they were asked for, and such that nobody asked for."""
        return self._lookahead.hits, self._lookahead.misses

    def handle(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Carry out a batch.

        Args:
            batch: A decoded batch.
            tensors: One CPU tensor per upload.

        Returns:
            The answer (to be sent only if the batch wants one) and its tensors.
        """
        uploads = iter(tensors)
        for command in batch.commands:
            if isinstance(command, (Run, Rerun)):
                self._run(command)
            elif isinstance(command, Free):
                self._lookahead.freed(command.handles)
                self._free(command.handles)
            else:
                self._lookahead.drop()
                self._change(command, uploads)
        if not batch.wants_reply:
            return Result(), []
        data: list[torch.Tensor] = []
        items = [self._fetch(handle, data) for handle in batch.fetch]
        items += [self._describe(handle) for handle in batch.describe]
        pending, self._failures = self._failures, []
        return Result(tuple(items), tuple(pending)), data

    def _change(self, command: Upload | Recall | Define | Seed | Forget, uploads: Iterator[torch.Tensor]) -> None:
        if isinstance(command, Upload):
            self._upload(command, next(uploads))
        elif isinstance(command, Recall):
            self._recall(command)
        elif isinstance(command, Define):
            self._define(command)
        elif isinstance(command, Seed):
            self._attempt(lambda: self._random.seed(command.seed))
        else:
            self._forecast.forget(command.programs)
            for program in command.programs:
                self._lookahead.forget(program)
                self._programs.pop(program, None)

    def _fail(self, error: BaseException, *, operator: str = "", run: int = -1, step: int = -1) -> Poisoned:
        self._last_failure += 1
        if len(self._failures) < MAX_FAILURES:
            self._failures.append(Failure(self._last_failure, failures.name_of(error), failures.text_of(error),
                                          operator, run, step))
        return Poisoned(self._failures[-1].identity)

    def _attempt(self, action: Any) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001  # becomes a failure that the client raises
            # Whatever an executor raises must reach the client as a failure, not end the session of an innocent value.
            return self._fail(error)

    def _define(self, command: Define) -> None:
        made = self._attempt(lambda: self._prepare(command))
        self._programs[command.program] = _Known(command, failed=made) if isinstance(made, Poisoned) else made

    def _prepare(self, command: Define) -> _Known:
        body, executor = command.body, self._executor
        body.check()
        checked = None if self._watch is None else self._watch.check(body)
        if checked is None or not checked.calls:
            return _Known(command, executor.compile(body), checked)
        if not isinstance(executor, CheckingExecutor):
            names = sorted({body.templates[template].operator for template in checked.calls})
            raise UnknownOperatorError(f"The executor {executor.name!r} cannot check the calls of {', '.join(names)}.",
                                       hint="Serve with an executor that has `compile_checked`.")
        return _Known(command, executor.compile_checked(body, checked.calls), checked)

    def _upload(self, command: Upload, tensor: torch.Tensor) -> None:
        if command.handle == GENERATOR_HANDLE:
            self._attempt(lambda: self._random.set(tensor))
        else:
            self._values[command.handle] = self._attempt(lambda: self._put(tensor))
            if self._contents is not None:
                self._contents.keep(command.handle, tensor)

    def _recall(self, command: Recall) -> None:
        contents, handle = self._contents, command.handle
        if handle == GENERATOR_HANDLE:
            self._fail(ProtocolError("Handle 0 is reserved."))
        elif contents is None:
            self._values[handle] = self._fail(ProtocolError("Nothing is kept for this session."))
        else:
            self._values[handle] = self._attempt(lambda: self._executor.put(contents.recall(handle, command.digest)))

    def _free(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._values.pop(handle, None)
        if self._contents is not None:
            self._contents.release(handles)

    def _run(self, command: Run | Rerun) -> None:
        ahead = self._lookahead.asked(command)
        run = self._attempt(lambda: self._forecast.complete(command))
        if isinstance(run, Poisoned):
            return
        try:
            outputs = self._outputs_of(run) if ahead is None else ahead
        except Exception as error:  # noqa: BLE001  # becomes a failure that the client raises
            # As above: the session goes on, the outputs are poisoned.
            outputs = [self._fail(error, run=run.program)] * len(run.outputs)
        self._values.update(zip(run.outputs, outputs, strict=True))
        if run.released:
            self._free(run.released)

    @property
    def can_look_ahead(self) -> bool:
        """Whether it is as good as certain what will be asked for next."""
        return self._lookahead.is_certain

    def look_ahead(self) -> bool:
        """Run one more program that will most likely be asked for next. To be called while nothing is to be handled.

        Returns:
            Whether one was run; if not, there is none.
        """
        return self._lookahead.go(self._values.get, self._run_ahead)

    def _run_ahead(self, run: Run, inputs: list[Any]) -> list[Any] | None:
        known = self._programs.get(run.program)
        program = None if known is None else known.program
        numbers = messages.from_wire(run.numbers)
        if (
            known is None
            or not isinstance(program, EarlyProgram)
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
            outputs = program.run(inputs, numbers, self._random, report)
        except Exception as error:  # noqa: BLE001  # nobody asked: it is reported when it is asked for and fails again
            failures.append(error)
        return None if failures else outputs

    def _outputs_of(self, run: Run) -> list[Any]:
        known = self._programs.get(run.program)
        if known is None:
            raise ProtocolError(f"Program {run.program} was never defined.")
        program, body = known.program, known.definition.body
        if program is None:
            return [known.failed] * len(run.outputs)
        if len(run.inputs) != body.inputs or len(run.outputs) != len(body.keep):
            raise ProtocolError(f"Program {run.program} has {body.inputs} inputs and {len(body.keep)} outputs, the run "
                                f"{len(run.inputs)} and {len(run.outputs)}.")
        if GENERATOR_HANDLE in run.outputs:
            raise ProtocolError("Handle 0 is reserved.")

        def report(step: int, error: BaseException) -> Poisoned:
            operator = body.templates[body.steps[step].template].operator
            return self._fail(error, operator=operator, run=run.program, step=step)

        inputs = [self._value(handle) for handle in run.inputs]
        before = list(inputs)
        numbers = messages.from_wire(run.numbers)
        refused = None if known.checked is None else known.checked.refused(inputs, numbers)
        if not refused:
            outputs = program.run(inputs, numbers, self._random, report)
        elif isinstance(program, PartialProgram):
            outputs = program.run_without(inputs, numbers, self._random, report, refused)
        else:
            raise next(iter(refused.values()))
        for given, left in zip(before, inputs, strict=True):
            if isinstance(left, Poisoned) and isinstance(given, torch.Tensor):
                self._poison_storage(given, left)
        return outputs

    def _poison_storage(self, tensor: torch.Tensor, poison: Poisoned) -> None:
        """Poison every value that shares a storage which should have been written and was not."""
        storage = tensor.untyped_storage()._cdata
        for handle, value in self._values.items():
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage:
                self._values[handle] = poison

    def _value(self, handle: int) -> Any:
        try:
            return self._values[handle]
        except KeyError:
            return self._fail(_unknown(handle))

    def _fetch(self, handle: int, data: list[torch.Tensor]) -> Item:
        if handle == GENERATOR_HANDLE:
            value = self._attempt(self._random.get)
        elif self._contents is not None and handle in (MARKS_HANDLE, DIGESTS_HANDLE):
            value = self._attempt(self._contents.marks if handle == MARKS_HANDLE else self._contents.digests)
        else:
            value = self._value(handle)
            if isinstance(value, torch.Tensor):
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
