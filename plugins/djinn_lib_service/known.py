"""A program that the client has defined in a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from djinn.errors import UnknownOperatorError
from djinn.ir.schema import facts_of
from djinn.wire.messages import Define, Poisoned
from djinn_lib_service.capabilities import CheckingExecutor, StoppableProgram
from djinn_lib_service.kinds.executor import CompiledProgram, Executor, RandomState, Report
from djinn_lib_service.kinds.guard import CheckedProgram
from djinn_lib_service.operators import operator_named


@attrs.frozen
class KnownProgram:
    """A defined program.

    Attributes:
        definition: The client's definition.
        program: The compiled program.
        checked: The guard's result.
        failed: Why the program cannot run.
        stoppable: The program, if it can stop between two steps.
    """

    definition: Define
    program: CompiledProgram | None = None
    checked: CheckedProgram | None = None
    failed: Poisoned | None = None
    stoppable: StoppableProgram | None = None

    @property
    def changes_metadata(self) -> bool:
        """Whether the program may change sizes, strides or storages of its inputs."""
        return self.program is not None and any(
            facts_of(operator_named(template.operator)).changes_metadata
            for template in self.definition.body.templates)

    def run(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run it; if it is stoppable, only until there is a reason to stop. See `StoppableProgram.run_until`."""
        if self.stoppable is not None:
            return self.stoppable.run_until(stop, inputs, numbers, random, report)
        assert self.program is not None, "only what was made ready is run"
        return self.program.run(inputs, numbers, random, report)


def made_ready(command: Define, checked: CheckedProgram | None, executor: Executor) -> KnownProgram:
    """Compile a program.

    Args:
        command: The definition.
        checked: The guard's result, if there is a guard.
        executor: Runs the program.

    Raises:
        UnknownOperatorError: The executor cannot run the program, or cannot perform the required checks of calls.
    """
    body = command.body
    if checked is None or not checked.calls:
        program = executor.compile(body)
    elif isinstance(executor, CheckingExecutor):
        program = executor.compile_checked(body, checked.calls)
    else:
        names = sorted({body.templates[template].operator for template in checked.calls})
        raise UnknownOperatorError(f"The executor {executor.name!r} cannot check the calls of {', '.join(names)}.",
                                   hint="Serve with an executor that has `compile_checked`.")
    return KnownProgram(command, program, checked, stoppable=program if isinstance(program, StoppableProgram) else None)
