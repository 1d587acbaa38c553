"""The programs that the client has defined in a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import attrs

from djinn.errors import UnknownOperatorError
from djinn.ir.schema import facts_of
from djinn.wire.messages import Define, Poisoned
from djinn_lib_service.kinds.executor import (
    CompiledProgram,
    Executor,
    RandomState,
    Report,
    SpareRoom,
    SupportsCheckedCompile,
    SupportsStop,
)
from djinn_lib_service.kinds.guard import CheckedProgram, ProgramChecker
from djinn_lib_service.operators import operator_named
from djinn_lib_service.program_check import check_program
from djinn_lib_service.program_names import name_of
from djinn_lib_service.reports import Failures
from djinn_lib_service.turns import Allowance

__all__ = ("DefinedProgram", "DefinedPrograms")


@attrs.frozen
class DefinedProgram:
    """A defined program.

    Attributes:
        definition: The client's definition.
        program: The compiled program.
        checked: The guard's result.
        failed: Why the program cannot run.
        stoppable: The program, if it can stop between two steps.
        changes_metadata: Whether the program may change sizes, strides or storages of its inputs.
    """

    definition: Define
    program: CompiledProgram | None = None
    checked: CheckedProgram | None = None
    failed: Poisoned | None = None
    stoppable: SupportsStop | None = None
    changes_metadata: bool = False

    @cached_property
    def name(self) -> str:
        """What it is called in lists for people."""
        return name_of(self.definition.body)

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
        """Check and compile a program. If that fails, each of its runs fails for the same reason."""
        made = self._failures.attempt(lambda: self._compiled(command))
        self._known[command.program] = DefinedProgram(command, failed=made) if isinstance(made, Poisoned) else made

    def forget(self, programs: Iterable[int]) -> None:
        """Drop programs."""
        for program in programs:
            self._known.pop(program, None)

    def clear(self) -> None:
        """Drop all programs."""
        self._known.clear()

    def _compiled(self, command: Define) -> DefinedProgram:
        if self._allowance is not None:
            self._allowance.admit_program(command.body)
        check_program(command.body)
        checked = None if self._watch is None else self._watch.check(command.body)
        body, executor = command.body, self._executor
        if checked is None or not checked.calls:
            program = executor.compile(body)
        elif isinstance(executor, SupportsCheckedCompile):
            program = executor.compile_checked(body, checked.calls)
        else:
            names = sorted({body.templates[template].operator for template in checked.calls})
            raise UnknownOperatorError(f"The executor {executor.name!r} cannot check the calls of {', '.join(names)}.",
                                       hint="Serve with an executor that has `compile_checked`.")
        if self._spare is not None:
            self._spare.admit(program)
        return DefinedProgram(command, program, checked,
                              stoppable=program if isinstance(program, SupportsStop) else None,
                              changes_metadata=any(facts_of(operator_named(template.operator)).changes_metadata
                                                   for template in body.templates))
