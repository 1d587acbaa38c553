"""Forecasts: repeated runs are delta-encoded against a prediction.

A loop runs the same programs again and again, and most fields that change between runs change at a constant rate:
handles rise by the number of values per iteration, weights keep their handles, a length grows by one. So both sides
extrapolate each program's next run from its last two. A run that differs from the prediction in a few positions is sent
as those positions.

Both sides predict from the same runs in the same order, so the prediction itself is never sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any

import attrs
import msgspec

from djinn.errors import ProtocolError
from djinn.wire.messages import Run, RunDelta

MAX_HANDLE = 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode


@attrs.define(eq=False)
class _Course:
    """The run history and the prediction of one program.

    Attributes:
        run: The last run.
        numbers: Its encoded numbers. Equal bytes mean equal numbers; ``==`` would not distinguish zeros by sign.
        expected: The predicted next run.
        is_even: Whether the prediction repeats the numbers of the last run.
    """

    run: Run
    numbers: bytes
    expected: Run
    is_even: bool = True

    def follow(self, run: Run, numbers: bytes) -> None:
        """Add the next run, with its encoded numbers."""
        last = self.run
        self.is_even = numbers == self.numbers
        self.expected = Run(
            run.program,
            _continued(last.inputs, run.inputs),
            run.numbers if self.is_even else _next(last.numbers, run.numbers),
            _continued(last.outputs, run.outputs),
            _continued(last.released, run.released),
        )
        self.run, self.numbers = run, numbers

    def shortened(self, run: Run, numbers: bytes) -> Run | RunDelta:
        """Return the differences from the prediction, or the whole run if most of it differs."""
        expected = self.expected
        parts = ((expected.inputs, run.inputs), (expected.outputs, run.outputs), (expected.released, run.released))
        if any(len(one) != len(other) for one, other in (*parts, (expected.numbers, run.numbers))):
            return run
        inputs, outputs, released = starmap(_changes, parts)
        changed: dict[int, Any] = {}
        if not (self.is_even and numbers == self.numbers):
            changed = {place: new for place, (old, new) in enumerate(zip(expected.numbers, run.numbers, strict=True))
                       if not _is_same(old, new)}
        told = len(inputs) + len(changed) + len(outputs) + len(released)
        if 2 * told > len(run.inputs) + len(run.numbers) + len(run.outputs) + len(run.released):
            return run
        return RunDelta(run.program, inputs, changed, outputs, released)

    def completed(self, rerun: RunDelta) -> Run:
        """Return the predicted run with the received differences applied."""
        expected = self.expected
        return Run(
            rerun.program,
            tuple(_changed(expected.inputs, rerun.inputs)),
            _changed(expected.numbers, rerun.numbers),
            tuple(_changed(expected.outputs, rerun.outputs)),
            tuple(_changed(expected.released, rerun.released)),
        )


class RunPredictor:
    """Predicts the runs of a session's programs, on one side of the connection.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._courses: dict[int, _Course] = {}

    def shorten(self, run: Run) -> Run | RunDelta:
        """Return the shorter form of a run that is about to be sent, and add the run to the history."""
        course, numbers = self._courses.get(run.program), _encode(run.numbers)
        short = run if course is None else course.shortened(run, numbers)
        self._take_in(run, numbers)
        return short

    def complete(self, command: Run | RunDelta) -> Run:
        """Return the complete run that a command stands for, and add it to the history.

        Raises:
            ProtocolError: There is no earlier run to predict from, or the result is not a valid run.
        """
        run = command if isinstance(command, Run) else self._continued(command)
        self._take_in(run, _encode(run.numbers))
        return run

    def expected(self, program: int) -> Run:
        """Return the predicted next run of a program.

        Raises:
            ProtocolError: As for `complete`.
        """
        return self._continued(RunDelta(program))

    def _continued(self, command: RunDelta) -> Run:
        return _completed(self._courses.get(command.program), command)

    def _take_in(self, run: Run, numbers: bytes) -> None:
        course = self._courses.get(run.program)
        if course is None:
            self._courses[run.program] = _Course(run, numbers, run)
        else:
            course.follow(run, numbers)

    def forget(self, programs: Iterable[int]) -> None:
        """Drop the history of programs that will not run again."""
        for program in programs:
            self._courses.pop(program, None)


class PredictedRuns:
    """Predicts several runs of a program in a row: the next ones, if those before them are as predicted.

    Args:
        predictor: Has the runs that were requested.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, predictor: RunPredictor) -> None:
        self._predictor = predictor
        self._courses: dict[int, _Course] = {}

    def expected(self, program: int) -> Run:
        """Return the next run of a program, after those that `follow` added.

        Raises:
            ProtocolError: As for `RunPredictor.complete`.
        """
        course = self._courses.get(program)
        return self._predictor.expected(program) if course is None else _completed(course, RunDelta(program))

    def follow(self, run: Run) -> None:
        """Add a run that `expected` has returned."""
        course = self._courses.get(run.program)
        if course is None:
            course = self._courses[run.program] = attrs.evolve(self._predictor._courses[run.program])
        course.follow(run, _encode(run.numbers))

    def clear(self) -> None:
        """Return to the runs that were requested."""
        self._courses.clear()


def _completed(course: _Course | None, command: RunDelta) -> Run:
    if course is None:
        raise ProtocolError(f"Program {command.program} has not been run, so nothing goes on.")
    run = course.completed(command)
    for handles in (run.inputs, run.outputs, run.released):
        if handles and not 0 <= min(handles) <= max(handles) <= MAX_HANDLE:
            raise ProtocolError(f"A run of program {command.program} would go on to handles that do not exist.")
    return run


def _continued(before: Sequence[int], last: tuple[int, ...]) -> tuple[int, ...]:
    if before == last or len(before) != len(last):
        return last
    return tuple([2 * new - old for old, new in zip(before, last, strict=True)])


def _next(old: Any, new: Any) -> Any:
    """Extrapolate integers and equally long lists of integers; return other values unchanged."""
    if type(old) is int and type(new) is int:
        return 2 * new - old
    if type(old) is list and type(new) is list and len(old) == len(new):
        return list(starmap(_next, zip(old, new, strict=True)))
    return new


def _changes(expected: Sequence[int], real: Sequence[int]) -> dict[int, int]:
    if expected == real:
        return {}
    return {place: new for place, (old, new) in enumerate(zip(expected, real, strict=True)) if old != new}


def _is_same(old: Any, new: Any) -> bool:
    """Whether two numbers have the same type and the same bits."""
    kind = type(new)
    if kind is not type(old):
        return False
    if kind is int:
        return bool(old == new)
    if kind is float:
        return bool(old == new) and math.copysign(1.0, old) == math.copysign(1.0, new)
    if kind is list:
        return len(old) == len(new) and all(starmap(_is_same, zip(old, new, strict=True)))
    return _encode(old) == _encode(new)


def _changed(expected: Sequence[Any], changes: Mapping[int, Any]) -> list[Any]:
    made = list(expected)
    for place, new in changes.items():
        if place >= len(made):
            raise ProtocolError(f"A run changes place {place} of {len(made)}.")
        made[place] = new
    return made
