"""The programs that the client has defined in a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from djinn.ir.program import Program, Step, Template
from djinn.ir.schema import facts_of
from djinn.wire.messages import Define, Poisoned
from djinn_plugins.common.calls.checked import CheckedPieces
from djinn_plugins.common.calls.program_check import check_program
from djinn_plugins.common.kinds.executor import (
    CompiledProgram,
    Executor,
    RandomState,
    Report,
    SpareRoom,
    SupportsCheckedCompile,
    SupportsPause,
    SupportsStop,
)
from djinn_plugins.common.kinds.guard import CheckedProgram, ProgramChecker
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.executor.partial_programs import PartialCheck, PartialProgram, remainder_of
from djinn_plugins.executor.program_names import name_of
from djinn_plugins.executor.reports import Failures
from djinn_plugins.executor.turns import Allowance

__all__ = ("DefinedProgram", "DefinedPrograms")


@attrs.frozen
class DefinedProgram:
    """A defined program.

    Attributes:
        definition: The client's definition.
        body: The part that is run, without the refused steps.
        program: The compiled program.
        checked: The guard's result.
        failed: Why the program cannot run.
        stoppable: The program, if it can stop between two steps.
        can_pause: Whether it can also pause there.
        changes_metadata: Whether the program may change sizes, strides or storages of its inputs.
        refused: By position: the steps that are never run, and why.
        begin: If it is a part of the defined program: its first step there.
    """

    definition: Define
    body: Program
    program: CompiledProgram | None = None
    checked: CheckedProgram | None = None
    failed: Poisoned | None = None
    stoppable: SupportsStop | None = None
    can_pause: bool = False
    changes_metadata: bool = False
    refused: Mapping[int, Exception] = attrs.field(factory=dict)
    begin: int = 0

    @cached_property
    def name(self) -> str:
        """Its name in lists for people."""
        return name_of(self.body)

    def run(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run it; if it is stoppable, only until there is a reason to stop. See `SupportsStop.run_until`."""
        if self.stoppable is not None:
            return self.stoppable.run_until(stop, inputs, numbers, random, report)
        assert self.program is not None, "only what was made ready is run"
        return self.program.run(inputs, numbers, random, report)


class DefinedPrograms:
    """The programs of a session, by number.

    Args:
        executor: Compiles them.
        failures: Records why a program cannot run.
        allowance: Limits their size; ``None`` for no limit.
        watch: Checks them before they are compiled; none if the client is this process itself.
        spare: Room that they may write values that grow into; ``None`` for none.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, executor: Executor, failures: Failures, allowance: Allowance | None = None,
                 watch: ProgramChecker | None = None, spare: SpareRoom | None = None) -> None:
        self._executor = executor
        self._failures = failures
        self._allowance = allowance
        self._watch = watch
        self._spare = spare
        self._known: dict[int, DefinedProgram] = {}
        self.get = self._known.get

    def define(self, command: Define) -> None:
        """Check and compile a program, without its steps that are refused; each of its runs reports them.

        If nothing of it can run, each of its runs fails for the same reason.
        """
        made = self._failures.attempt(lambda: self._defined(command))
        self._known[command.program] = DefinedProgram(command, command.body, failed=made) if isinstance(
            made, Poisoned) else made

    def without(self, known: DefinedProgram, refused: Mapping[int, Exception]) -> DefinedProgram:
        """Return a program without some of its steps, for an executor that cannot leave out steps of a run."""
        more = {step: error for step, error in known.refused.items() if step not in refused}
        return self._partial(known.definition, {**refused, **more})

    def part(self, whole: DefinedProgram, body: Program, begin: int) -> DefinedProgram:
        """Check and compile a part of a program.

        Args:
            whole: The program.
            body: Some of its steps.
            begin: The first one of them.
        """
        command = Define(whole.definition.program, body)
        refused = {step - begin: error for step, error in whole.refused.items() if 0 <= step - begin < len(body.steps)}
        made = self._partial(command, refused) if refused else self._compiled(command, body)
        return attrs.evolve(made, begin=begin)

    def forget(self, programs: Iterable[int]) -> None:
        """Drop programs."""
        for program in programs:
            self._known.pop(program, None)

    def clear(self) -> None:
        """Drop all programs."""
        self._known.clear()

    def _defined(self, command: Define) -> DefinedProgram:
        body = command.body
        beyond = {} if self._allowance is None else self._allowance.steps_beyond(len(body.steps))
        check_program(body)
        if beyond:
            return self._partial(command, {**self._refused_steps(body, len(body.steps) - len(beyond)), **beyond})
        try:
            return self._compiled(command, body)
        except Exception:
            refused = self._refused_steps(body, len(body.steps))
            if not refused:
                raise
        return self._partial(command, refused)

    def _refused_steps(self, body: Program, count: int) -> dict[int, Exception]:
        """Find which of a program's first steps cannot be compiled alone; each form of a call is tried once."""
        found: dict[tuple[int, int, int], Exception | None] = {}
        refused: dict[int, Exception] = {}
        for position, step in enumerate(body.steps[:count]):
            form = step.template, len(step.operands), step.results
            if form not in found:
                found[form] = self._reason(body.templates[step.template], *form[1:])
            error = found[form]
            if error is not None:
                refused[position] = error
        return refused

    def _reason(self, template: Template, operands: int, results: int) -> Exception | None:
        """Return why a call cannot be compiled, or ``None``."""
        alone = Program((template,), (Step(0, tuple(range(-1, -1 - operands, -1)), results),), operands, ())
        try:
            self._compile(alone)
        except Exception as error:  # noqa: BLE001  # becomes the failure of the steps that make this call
            # Its frames refer to the program.
            error.__traceback__ = error.__context__ = None
            return error
        return None

    def _partial(self, command: Define, refused: Mapping[int, Exception]) -> DefinedProgram:
        left = remainder_of(command.body, refused)
        made = self._compiled(command, left.body)
        assert made.program is not None
        program = PartialProgram(left, made.program)
        return attrs.evolve(made, program=program, stoppable=made.stoppable and program, refused=refused,
                            checked=None if made.checked is None else PartialCheck(left, made.checked))

    def _compiled(self, command: Define, body: Program) -> DefinedProgram:
        program, checked = self._compile(body)
        if self._spare is not None and not isinstance(program, CheckedPieces):
            self._spare.admit(program)
        return DefinedProgram(command, body, program, checked,
                              stoppable=program if isinstance(program, SupportsStop) else None,
                              can_pause=isinstance(program, SupportsPause) and program.can_pause,
                              changes_metadata=any(facts_of(operator_named(template.operator)).changes_metadata
                                                   for template in body.templates))

    def _compile(self, body: Program) -> tuple[CompiledProgram, CheckedProgram | None]:
        checked, executor = None if self._watch is None else self._watch.check(body), self._executor
        if checked is None or not checked.calls:
            return executor.compile(body), checked
        if isinstance(executor, SupportsCheckedCompile):
            return executor.compile_checked(body, checked.calls), checked
        return CheckedPieces(executor, body, checked.calls), checked
