"""Runs of a checked program: estimates the memory that each step needs, and refuses runs that are too large."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from djinn.errors import ProtocolError
from djinn.ir.program import Program
from djinn.ir.schema import ReturnKind
from djinn_plugins.common.kinds.guard import Bounds, CallCheck
from djinn_plugins.common.operators.operators import is_as_declared
from djinn_plugins.guard.estimate import UNKNOWN, UNSIZED, Answer, Answers, Called
from djinn_plugins.guard.preconditions import too_large

__all__ = ("CheckedSteps",)

_NUMBERS = frozenset((int, float, complex))
_NOTHING = Answer((), (), 0)
_ANYTHING = Answer((), (), 2**63)
"""The answer for a step if the size of an operand is not known before another step has run. It needs another run, which
sees that size; a server divides the program."""


@attrs.frozen(eq=False)
class _Step:
    """One step, prepared for estimates.

    Attributes:
        called: Its template.
        operands: Its tensors, as the program refers to them.
        first: Position of its first number.
        start: Index of its first result.
        results: Number of its results.
        groups: For each result: the group of values that may share its storage.
        dead: Groups that are no longer needed after it.
    """

    called: Called
    operands: tuple[int, ...]
    first: int
    start: int
    results: int
    groups: tuple[int, ...]
    dead: tuple[int, ...]


@attrs.define(eq=False)
class _Course:
    """The estimate of the last run.

    Attributes:
        specs: Specs of its inputs.
        numbers: Its numbers.
        kinds: Their types.
        known: Specs of all values; input ``i`` is at ``-1 - i``.
        answers: The answer for each step.
        most_bytes: Upper bound of the memory held at any time.
        epoch: The epoch of the spec numbers.
    """

    specs: list[int]
    numbers: list[Any]
    kinds: list[type]
    known: list[int]
    answers: list[Answer]
    most_bytes: int
    epoch: object


class CheckedSteps:
    """A program that may run; see `djinn_plugins.common.kinds.guard.CheckedProgram`.

    A run equal to the last one is permitted at once. If some inputs and numbers differ, as in a loop over a growing
    text, only the steps that they affect are estimated again. All steps are estimated only if the result might be too
    large, or for the first run.
    """

    def __init__(self, program: Program, called: Sequence[Called], answers: Answers, bounds: Bounds) -> None:
        self.calls: Mapping[int, CallCheck] = {
            index: made.check for index, made in enumerate(called) if made.check is not None}
        self._answers = answers
        self._limit_bytes = bounds.program_bytes
        self._steps = list(_steps_of(program, called))
        self._results = sum(step.results for step in program.steps)
        self._numbers = [position for position, step in enumerate(self._steps) for _ in range(step.called.numbers)]
        """By number: the step that takes it."""
        self._users: dict[int, list[int]] = {}
        """By value: the steps that take it."""
        for position, step in enumerate(self._steps):
            for operand in step.operands:
                self._users.setdefault(operand, []).append(position)
        self._changes_metadata = any(
            made.facts.changes_metadata or not is_as_declared(made.operator) for made in called)
        self._last: _Course | None = None

    def refused(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Mapping[int, Exception]:
        """Return the steps of a run that cannot be executed; see `CheckedProgram.refused`."""
        if len(numbers) != len(self._numbers):
            raise ProtocolError(f"The program takes {len(self._numbers)} numbers, the run brings {len(numbers)}.")
        last, kinds = self._last, list(map(type, numbers))
        are_same = last is not None and kinds == last.kinds and numbers == last.numbers
        if not are_same:
            _check_numbers(numbers)
        if not self._limit_bytes:
            return {}
        epoch = self._answers.begin()
        if last is not None and last.epoch is not epoch:
            self._last = last = None
        specs = self._answers.specs_of(inputs, may_change=self._changes_metadata)
        if last is not None and ((are_same and specs == last.specs) or self._goes_on(last, specs, numbers, kinds)):
            return {}
        return self._gone_through(specs, numbers, kinds, epoch)

    @property
    def taken_bytes(self) -> int:
        """Memory that the last run holds at any time; see `djinn_plugins.common.kinds.guard.SupportsSizing`."""
        return 0 if self._last is None else self._last.most_bytes

    def measure(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> int:
        """Estimate a run step by step; see `djinn_plugins.common.kinds.guard.SupportsSizing`."""
        self._last = None
        self.refused(inputs, numbers)
        return self.taken_bytes

    def _goes_on(self, last: _Course, specs: list[int], numbers: Sequence[Any], kinds: list[type]) -> bool:
        """Update the last estimate, for the steps that changed inputs and numbers affect.

        Returns:
            Whether the run certainly fits. If not, the result is unknown.
        """
        if self._changes_metadata:
            return False
        known, users = last.known, self._users
        ahead: list[int] = []
        for index, (old, new) in enumerate(zip(last.specs, specs, strict=True)):
            if old != new:
                known[-1 - index] = new
                ahead += users.get(-1 - index, ())
        ahead += [self._numbers[index] for index, (old, new) in enumerate(zip(last.numbers, numbers, strict=True))
                  if old is not new and (old != new or type(old) is not type(new))]
        heapq.heapify(ahead)
        before, grown = -1, 0
        while ahead:
            position = heapq.heappop(ahead)
            if position == before:
                continue
            before = position
            step = self._steps[position]
            old_answer, answer = last.answers[position], self._answer(step, known, numbers)
            if answer is old_answer:
                continue
            last.answers[position] = answer
            grown += max(answer.total_bytes - old_answer.total_bytes, 0)
            for index, spec in enumerate(answer.results or (UNKNOWN,) * step.results, step.start):
                if known[index] != spec:
                    known[index] = spec
                    for user in users.get(index, ()):
                        heapq.heappush(ahead, user)
        last.specs, last.numbers, last.kinds = specs, list(numbers), kinds
        last.most_bytes += grown
        if last.most_bytes > self._limit_bytes:
            self._last = None
            return False
        return True

    def _answer(self, step: _Step, known: Sequence[int], numbers: Sequence[Any]) -> Answer:
        """Return the effect of a step; unknown if an operand is no tensor."""
        operands = [known[operand] for operand in step.operands]
        called = step.called
        if UNKNOWN in operands:
            return _NOTHING
        if UNSIZED in operands:
            return _ANYTHING if called.allocates else Answer((UNSIZED,) * step.results, (0,) * step.results, 0)
        mine = numbers[step.first : step.first + called.numbers] if called.numbers else ()
        # A wrong call may have been recorded with any number of results.
        key = (called.number, step.results, *operands, *[
            _frozen(number) if index in called.matters else type(number) for index, number in enumerate(mine)])
        return self._answers.find(key) or self._answers.ask(key, called, operands, mine, step.results)

    def _gone_through(
        self, specs: list[int], numbers: Sequence[Any], kinds: list[type], epoch: object
    ) -> dict[int, Exception]:
        """Estimate all steps, and refuse those that would need too much memory."""
        known = [UNKNOWN] * self._results + list(reversed(specs))
        made: list[Answer] = []
        taken: dict[int, int] = {}
        refused: dict[int, Exception] = {}
        held = most = 0
        for position, step in enumerate(self._steps):
            answer = self._answer(step, known, numbers)
            made.append(answer)
            if held + answer.total_bytes > self._limit_bytes:
                refused[position] = too_large(step.called.operator.name(), answer.total_bytes, held, self._limit_bytes)
            elif answer is not _NOTHING:
                known[step.start : step.start + step.results] = answer.results
                for operand, spec in answer.changes:
                    known[step.operands[operand]] = spec
                held += answer.total_bytes
                most = max(most, held)
                for group, size_bytes in zip(step.groups, answer.sizes_bytes, strict=True):
                    taken[group] = taken.get(group, 0) + size_bytes
            for group in step.dead:
                held -= taken.pop(group, 0)
        self._last = None if refused else _Course(specs, list(numbers), kinds, known, made, most, epoch)
        return refused


def _steps_of(program: Program, called: Sequence[Called]) -> Iterator[_Step]:
    """Yield the steps, with the last use of each group of values that may share a storage."""
    groups: dict[int, int] = {}
    last: dict[int, int] = {}
    laid: list[tuple[Called, tuple[int, ...], int, int, int]] = []
    produced = first = 0
    for position, step in enumerate(program.steps):
        made = called[step.template]
        last.update((groups[operand], position) for operand in step.operands if operand >= 0)
        flat = [alias for kind, alias in zip(made.facts.returns, made.aliases, strict=True)
                if kind is not ReturnKind.WRITTEN]
        for index in range(step.results):
            alias = flat[min(index, len(flat) - 1)] if flat else ()
            shared = step.operands[alias[0]] if alias else -1
            # A value that shares an input's storage is kept alive by the owner of the input.
            groups[produced + index] = groups[shared] if shared >= 0 else produced + index
            last[groups[produced + index]] = position
        laid.append((made, step.operands, first, produced, step.results))
        produced += step.results
        first += made.numbers
    kept = {groups[index] for index in program.keep}
    dead: dict[int, list[int]] = {}
    for group, position in last.items():
        if group not in kept:
            dead.setdefault(position, []).append(group)
    for position, (made, operands, at, start, results) in enumerate(laid):
        yield _Step(made, operands, at, start, results,
                    tuple(groups[index] for index in range(start, start + results)), tuple(dead.get(position, ())))


def _frozen(item: Any) -> Any:
    """Convert numbers to a key in which an integer and an equal float differ."""
    kind = type(item)
    if kind is int:
        return item
    return tuple(map(_frozen, item)) if kind is list else (kind, item)


def _check_numbers(numbers: Sequence[Any]) -> None:
    """Check that numbers are numbers, or lists of numbers.

    Raises:
        ProtocolError: One is not.
    """
    for number in numbers:
        kind = type(number)
        if kind not in _NUMBERS and not (kind is list and _NUMBERS.issuperset(map(type, number))):
            raise ProtocolError(f"A {kind.__name__} where a number, or a list of numbers, was expected.")
