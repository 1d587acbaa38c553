"""Programs of which some steps are refused: the others run.

The rest of a program takes the missing results as further inputs. They are poisoned, so that the executor skips
the steps which depend on them, as after a step that has raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from djinn.errors import ProtocolError
from djinn.ir.program import Program, Step
from djinn.wire.messages import Poisoned
from djinn_plugins.common.kinds.executor import (
    CompiledProgram,
    Effects,
    RandomState,
    Report,
    SupportsEffectReport,
    SupportsPause,
    SupportsStop,
)
from djinn_plugins.common.kinds.guard import CheckedProgram, SupportsSizing
from djinn_plugins.common.operators.dropout import count_numbers

__all__ = ("PartialCheck", "PartialProgram", "Remainder", "remainder_of")


@attrs.frozen(eq=False)
class Remainder:
    """The rest of a program.

    Attributes:
        body: The remaining steps, as a program.
        inputs: How many inputs the whole program has.
        refused: Why steps are refused, each reason once, with the first step that it holds for.
        absent: For each further input of the body: the step that would have computed it.
        reasons: By step that is left out: its place in ``refused``.
        steps: For each step of the body: its position in the whole program.
        numbers: For each number of the body: its position in the whole program.
        taken: How many numbers the whole program takes.
        kept: For each kept result of the whole program: its position among those of the body, or ``-1 - step`` if that
            step is left out.
    """

    body: Program
    inputs: int
    refused: tuple[tuple[int, Exception], ...]
    absent: tuple[int, ...]
    reasons: Mapping[int, int]
    steps: tuple[int, ...]
    numbers: tuple[int, ...]
    taken: int
    kept: tuple[int, ...]

    def given(self, inputs: Sequence[Any], poison: Sequence[Poisoned]) -> list[Any]:
        """Return the inputs of the body; the poison is by reason."""
        return [*inputs, *(poison[self.reasons[step]] for step in self.absent)]

    def counted(self, numbers: Sequence[Any]) -> list[Any]:
        """Return the numbers of the body.

        Raises:
            ProtocolError: There are too many numbers, or too few.
        """
        if len(numbers) != self.taken:
            raise ProtocolError(f"The program takes {self.taken} numbers, the run brings {len(numbers)}.")
        return [numbers[position] for position in self.numbers]


def remainder_of(program: Program, refused: Mapping[int, Exception]) -> Remainder:
    """Leave out steps of a checked program.

    Args:
        program: The program.
        refused: By position: the steps to leave out, and why.
    """
    widths = [sum(count_numbers(form) for form in (*template.arguments, *(form for _, form in template.keywords)))
              for template in program.templates]
    templates: dict[int, int] = {}
    reasons: dict[int, int] = {}
    places: dict[int, int] = {}
    absent: dict[int, int] = {}
    """By result that is left out: its place among the further inputs."""
    makers: dict[int, int] = {}
    """By result that is left out: the step that would have computed it."""
    told: list[tuple[int, Exception]] = []
    moved: dict[int, int] = {}
    """By remaining result: its index in the body."""
    steps: list[Step] = []
    positions: list[int] = []
    numbers: list[int] = []
    produced = taken = 0
    for position, step in enumerate(program.steps):
        results = range(produced, produced + step.results)
        produced += step.results
        mine = range(taken, taken + widths[step.template])
        taken += len(mine)
        if (error := refused.get(position)) is not None:
            if id(error) not in places:
                places[id(error)] = len(told)
                told.append((position, error))
            reasons[position] = places[id(error)]
            makers.update(dict.fromkeys(results, position))
            continue
        operands = tuple([
            operand if operand < 0 else moved[operand] if operand in moved
            else -1 - program.inputs - absent.setdefault(operand, len(absent)) for operand in step.operands])
        moved.update((result, len(moved)) for result in results)
        steps.append(Step(templates.setdefault(step.template, len(templates)), operands, step.results))
        positions.append(position)
        numbers += mine
    keep = [index for index in program.keep if index in moved]
    order = {index: place for place, index in enumerate(keep)}
    body = Program(tuple(program.templates[template] for template in templates), tuple(steps),
                   program.inputs + len(absent), tuple(moved[index] for index in keep))
    return Remainder(
        body, program.inputs, tuple(told), tuple(makers[result] for result in absent), reasons, tuple(positions),
        tuple(numbers), taken, tuple(order[index] if index in order else -1 - makers[index] for index in program.keep))


class PartialProgram:
    """A compiled program of which some steps are refused; see `djinn_plugins.common.kinds.executor.CompiledProgram`.

    Args:
        remainder: The rest of it.
        program: The remainder's body, compiled.
    """

    def __init__(self, remainder: Remainder, program: CompiledProgram) -> None:
        self._remainder = remainder
        self._program = program

    @property
    def effects(self) -> Effects:
        """Its possible effects; see `djinn_plugins.common.kinds.executor.SupportsEffectReport`."""
        inputs = range(self._remainder.inputs)
        if not isinstance(self._program, SupportsEffectReport):
            return Effects(written=frozenset(inputs), changes_storages=True)
        effects = self._program.effects
        return Effects(written=effects.written.intersection(inputs), changes_storages=effects.changes_storages)

    @property
    def can_pause(self) -> bool:
        """Whether it can pause between two steps; see `djinn_plugins.common.kinds.executor.SupportsPause`."""
        return isinstance(self._program, SupportsPause) and self._program.can_pause

    def run(self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report) -> list[Any]:
        """Run once; see `djinn_plugins.common.kinds.executor.CompiledProgram`."""
        return self.run_until((), inputs, numbers, random, report)

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once, or a part of it; see `djinn_plugins.common.kinds.executor.SupportsStop`."""
        left = self._remainder
        mine = left.counted(numbers)
        poison = [report(step, error) for step, error in left.refused]
        given = left.given(inputs, poison)

        def report_whole(step: int, error: BaseException) -> Poisoned:
            return report(left.steps[step], error)

        program = self._program
        outputs = program.run_until(stop, given, mine, random, report_whole) if isinstance(program, SupportsStop) else (
            program.run(given, mine, random, report_whole))
        inputs[:] = given[:len(inputs)]
        return [outputs[place] if place >= 0 else poison[left.reasons[-1 - place]] for place in left.kept]


class PartialCheck:
    """The guard's result for the rest of a program; see `djinn_plugins.common.kinds.guard.CheckedProgram`.

    Args:
        remainder: The rest of the program.
        checked: The guard's result for the remainder's body.
    """

    def __init__(self, remainder: Remainder, checked: CheckedProgram) -> None:
        self.calls = checked.calls
        self._remainder = remainder
        self._checked = checked
        self._nothing = [Poisoned(0)] * len(remainder.refused)

    def refused(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Mapping[int, Exception]:
        """Return which further steps a run cannot execute; see `CheckedProgram.refused`."""
        left = self._remainder
        found = self._checked.refused(left.given(inputs, self._nothing), left.counted(numbers))
        return {left.steps[step]: error for step, error in found.items()}

    @property
    def taken_bytes(self) -> int:
        """Memory that the last run holds; see `djinn_plugins.common.kinds.guard.SupportsSizing`."""
        return self._checked.taken_bytes if isinstance(self._checked, SupportsSizing) else 0

    def measure(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> int:
        """Estimate a run step by step; see `djinn_plugins.common.kinds.guard.SupportsSizing`."""
        left = self._remainder
        return 0 if not isinstance(self._checked, SupportsSizing) else self._checked.measure(
            left.given(inputs, self._nothing), left.counted(numbers))
