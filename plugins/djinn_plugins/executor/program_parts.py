"""Parts of programs: a program for which there is no room may fit step by step, as eager code would have run it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs

from djinn.errors import OutOfMemoryError, ProgramTooLargeError
from djinn.ir.program import Program, Step
from djinn.wire.messages import Run
from djinn_plugins.common.operators.dropout import count_numbers
from djinn_plugins.executor.program_table import DefinedProgram

__all__ = ("NO_ROOM", "DividedProgram", "ProgramPart")

NO_ROOM = (OutOfMemoryError, ProgramTooLargeError)
"""Raised before a program has begun."""


@attrs.frozen
class ProgramPart:
    """Some steps of a program, as a program.

    Attributes:
        known: The program that they are.
        number: Its number in the session; clients choose no negative ones.
        begin, end: Which steps they are.
        inputs: Its inputs, as the whole refers to them: a result's index, or ``-1 - i`` for input ``i``.
        results: Which results of the whole it keeps.
        numbers: Which numbers of a run it takes.
        dead: Results of the whole that nothing reads after it.
    """

    known: DefinedProgram
    number: int
    begin: int
    end: int
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    numbers: slice
    dead: tuple[int, ...]


class DividedProgram:
    """A program that runs in parts.

    Args:
        whole: The program.
        compile: Compiles a part, given its body and where it begins.
    """

    def __init__(self, whole: DefinedProgram, compile: Callable[[Program, int], DefinedProgram]) -> None:  # noqa: A002
        self._whole = whole
        self._body = body = whole.definition.body
        self._compile = compile
        self._parts: dict[int, ProgramPart] = {}
        """The parts that had room, by where they begin."""
        counts = [sum(map(count_numbers, (*template.arguments, *(argument for _, argument in template.keywords))))
                  for template in body.templates]
        self._numbers = [0, *itertools.accumulate(counts[step.template] for step in body.steps)]
        self._results = [0, *itertools.accumulate(step.results for step in body.steps)]
        self._last_use = {result: position for position, step in enumerate(body.steps)
                          for result in (*step.operands, *range(self._results[position], self._results[position + 1]))}

    def run(self, run: Run, carry_out: Callable[[DefinedProgram, Run, bool], bool],
            drop: Callable[[Sequence[int]], None]) -> None:
        """Run the parts, in order.

        Args:
            run: The run of the whole; outputs that the session may not keep are left out, at the end.
            carry_out: Runs a part and keeps its results, and returns whether there was room for it. The last
                argument says that the part is one step, which cannot be divided: then it reports a failure instead.
            drop: Drops values that nothing needs any more.
        """
        handles = dict(zip(self._body.keep, run.outputs, strict=False))
        count, begin = len(self._body.steps), 0
        size = count // 2
        try:
            while begin < count:
                part = self._parts.get(begin) or self._part(begin, min(begin + size, count))
                size = part.end - part.begin
                # Clients choose no negative handles.
                handles.update((result, -1 - result) for result in part.results if result not in handles)
                inputs = tuple(run.inputs[-1 - source] if source < 0 else handles[source] for source in part.inputs)
                outputs = tuple(handles[result] for result in part.results)
                if carry_out(part.known, Run(part.number, inputs, run.numbers[part.numbers], outputs), size == 1):
                    self._parts[begin] = part
                    drop([handles.pop(result) for result in part.dead])
                    begin, size = part.end, 2 * size
                else:
                    self._parts.pop(begin, None)
                    size //= 2
        finally:
            drop([handle for handle in handles.values() if handle < 0])

    def _part(self, begin: int, end: int) -> ProgramPart:
        body, first, after = self._body, self._results[begin], self._results[end]
        steps = body.steps[begin:end]
        inputs = tuple(dict.fromkeys(
            operand for step in steps for operand in step.operands if not first <= operand < after))
        templates = {template: index for index, template in enumerate(dict.fromkeys(step.template for step in steps))}
        operands = {source: -1 - index for index, source in enumerate(inputs)}
        operands.update((result, result - first) for result in range(first, after))
        kept = frozenset(body.keep)
        results = tuple(result for result in range(first, after)
                        if result in kept or self._last_use[result] >= end)
        made = Program(
            tuple(body.templates[template] for template in templates),
            tuple(Step(templates[step.template], tuple(operands[operand] for operand in step.operands),
                       step.results) for step in steps),
            len(inputs), tuple(result - first for result in results))
        dead = tuple(source for source in inputs if source >= 0 and source not in kept and self._last_use[source] < end)
        base = len(body.steps) + 1
        number = -1 - ((self._whole.definition.program * base + begin) * base + end)
        return ProgramPart(self._compile(made, begin), number, begin, end, inputs, results,
                           slice(self._numbers[begin], self._numbers[end]), dead)

