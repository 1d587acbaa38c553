"""Cuts a program into segments that repeat exactly, and the steps between them.

A step repeats exactly if its operands have the same forms, and its numbers are the same, in every run. A cache that
grows does not, nor does attention to it; a step that returns a plain value waits for the device. These steps run one by
one, and everything between them is a segment. This module accesses no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import attrs
import torch

from djinn.ir.program import ListArgument, NumberArgument, Program, Step, Template, TensorArgument
from djinn.ir.schema import ReturnKind
from djinn.ir.spec import tensors_in
from djinn_plugins.common.calls.binding import BoundCall
from djinn_plugins.executor.cuda.graph_eligibility import Form, digest_of_numbers, form_of
from djinn_plugins.executor.torch.codegen import frames_of, straight_line

__all__ = ("OutlinedProgram", "RecordableSegment", "StepHistory", "cut")


@attrs.frozen
class RecordableSegment:
    """Consecutive steps of a program, as a program of their own.

    Attributes:
        begin, end: The steps: ``begin <= step < end``.
        program: These steps; it keeps what later steps use and what the whole program keeps.
        calls: Its bound templates.
        inputs: Operands of the whole program that it reads, in the order of its inputs.
        outputs: Results of the whole program that it keeps.
        first_result: The first result of its first step, in the whole program.
        numbers: How many numbers it takes.
    """

    begin: int
    end: int
    program: Program
    calls: tuple[BoundCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first_result: int
    numbers: int


class StepHistory:
    """Notes in which steps of a program something differs from run to run.

    Args:
        program: The program.
        calls: Its bound templates.
        device: The device on which it runs.
    """

    def __init__(self, program: Program, calls: Sequence[BoundCall], device: torch.device) -> None:
        self._calls = calls
        self._program = program
        self._device = device
        self._seen: list[tuple[Any, ...] | None] = [None] * len(program.steps)
        self.varies = [False] * len(program.steps)

    def watched(self, numbers: Sequence[Any]) -> tuple[Program, list[BoundCall]]:
        """Return the program for one run that is noted; all positions are the same."""
        steps, calls, taken = list[Step](), list[BoundCall](), 0
        for position, step in enumerate(self._program.steps):
            call = self._calls[step.template]
            mine = digest_of_numbers(numbers[taken : taken + call.numbers])
            taken += call.numbers
            steps.append(Step(position, step.operands, step.results))
            calls.append(attrs.evolve(call, function=self._noting(position, mine, call.function)))
        templates = tuple(self._program.templates[step.template] for step in self._program.steps)
        return Program(templates, tuple(steps), self._program.inputs, self._program.keep), calls

    def _noting(self, position: int, numbers: bytes, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            forms: list[Form | None] = [
                form_of(value, self._device) for value in tensors_in((arguments, tuple(keywords.values())))]
            now = numbers, *forms
            before, self._seen[position] = self._seen[position], now
            if None in forms or (before is not None and before != now):
                self.varies[position] = True
            return function(*arguments, **keywords)

        return call


def cut(
    program: Program, calls: Sequence[BoundCall], repeats: Sequence[bool], *, least_steps: int
) -> list[RecordableSegment]:
    """Return the longest pieces of a program whose steps all repeat, if they have enough steps."""
    found, begin = list[RecordableSegment](), 0
    last_use = _last_uses(program)
    while begin < len(program.steps):
        end = begin
        while end < len(program.steps) and repeats[end]:
            end += 1
        if end - begin >= least_steps:
            found.append(_segment(program, calls, begin, end, last_use))
        begin = max(end, begin + 1)
    return found


def _last_uses(program: Program) -> dict[int, int]:
    """Return by result the last step that uses it; a step after the last one for what the program keeps."""
    last = {operand: position for position, step in enumerate(program.steps) for operand in step.operands}
    return last | dict.fromkeys(program.keep, len(program.steps))


def _segment(
    program: Program, calls: Sequence[BoundCall], begin: int, end: int, last_use: dict[int, int]
) -> RecordableSegment:
    steps = program.steps[begin:end]
    first = sum(step.results for step in program.steps[:begin])
    produced = sum(step.results for step in steps)
    inputs = list(dict.fromkeys(operand for step in steps for operand in step.operands if operand < first))
    position_of = {operand: -1 - index for index, operand in enumerate(inputs)}
    used = list(dict.fromkeys(step.template for step in steps))
    template_of = {template: index for index, template in enumerate(used)}
    outputs = [result for result in range(first, first + produced) if last_use.get(result, -1) >= end]
    inner = Program(
        tuple(program.templates[template] for template in used),
        tuple(Step(template_of[step.template], tuple(
            position_of[operand] if operand < first else operand - first for operand in step.operands), step.results)
            for step in steps),
        len(inputs), tuple(result - first for result in outputs))
    return RecordableSegment(
        begin, end, inner, tuple(calls[template] for template in used), tuple(inputs), tuple(outputs), first,
        sum(calls[step.template].numbers for step in steps))


class OutlinedProgram:
    """A program in which each segment is one call.

    Args:
        program: The program.
        calls: Its bound templates.
        segments: Its segments, in order.
        players: What runs each of them: takes its inputs and its numbers, and returns its outputs.

    Attributes:
        function: The whole, as straight-line Python; it takes inputs, numbers, and reasons to stop.
    """

    def __init__(
        self, program: Program, calls: Sequence[BoundCall], segments: Sequence[RecordableSegment],
        players: Sequence[Callable[[list[Any], list[Any]], list[Any]]],
    ) -> None:
        self._segments = {segment.begin: segment for segment in segments}
        self._first_steps: list[int] = []
        self._results: list[int] = []
        """By result of the outlined program: the result of the program."""
        made, bound, steps = list[Template](program.templates), list(calls), list[Step]()
        player_at = dict(zip(self._segments, players, strict=True))
        index_of: dict[int, int] = {}
        position = produced = 0
        while position < len(program.steps):
            self._first_steps.append(position)
            segment = self._segments.get(position)
            if segment is None:
                step = program.steps[position]
                template, operands = step.template, step.operands
                given: Sequence[int] = range(produced, produced + step.results)
                produced, position = produced + step.results, position + 1
            else:
                template, operands, given = len(bound), segment.inputs, segment.outputs
                made.append(program.templates[program.steps[position].template])
                bound.append(_call_of(segment, player_at[position]))
                produced += sum(step.results for step in program.steps[segment.begin : segment.end])
                position = segment.end
            for result in given:
                index_of[result] = len(self._results)
                self._results.append(result)
            steps.append(Step(template, tuple(index_of.get(operand, operand) for operand in operands), len(given)))
        self._steps = steps
        self.function = straight_line(
            Program(tuple(made), tuple(steps), program.inputs, tuple(index_of[kept] for kept in program.keep)), bound)

    def where(self, traceback: TracebackType | None) -> tuple[int | None, dict[int, Any]]:
        """Return the step of the program that raised, and the results before it that are still needed."""
        frames = frames_of(traceback)
        if not frames:
            return None, {}
        outer, variables = frames[0]
        produced = sum(step.results for step in self._steps[:outer])
        known = {self._results[index]: value for index, value in _results_in(variables, produced)}
        step = self._first_steps[outer]
        segment = self._segments.get(step)
        if segment is not None and len(frames) > 1:
            inner, variables = frames[1]
            produced = sum(made.results for made in segment.program.steps[:inner])
            known |= {segment.first_result + index: value for index, value in _results_in(variables, produced)}
            step += inner
        return step, known


def _results_in(variables: dict[str, Any], produced: int) -> list[tuple[int, Any]]:
    return [(int(name[1:]), value) for name, value in variables.items()
            if name[0] == "r" and name[1:].isdigit() and int(name[1:]) < produced]


def _call_of(segment: RecordableSegment, player: Callable[[list[Any], list[Any]], list[Any]]) -> BoundCall:
    return attrs.evolve(
        segment.calls[0], function=player, keywords=(), returns=(ReturnKind.LIST,), numbers=segment.numbers,
        arguments=(ListArgument((TensorArgument(),) * len(segment.inputs)),
                   ListArgument((NumberArgument(),) * segment.numbers)))
