"""Forecasts: repeated runs are delta-encoded against a prediction.

A loop runs the same programs again and again, and most fields that change between runs change at a constant rate:
handles rise by the number of values per iteration, weights keep their handles, a length grows by one. So both sides
extrapolate each program's next run from those before. A run that differs from the prediction in a few positions is sent
as those positions.

Where a loop begins anew, its handles jump once or twice, and then rise as they did before. A rate that has been seen
twice in a row is therefore kept until another one has been.

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
_EXACT = 2.0**50
"""Below this, sums and differences of whole real numbers are exact."""
_encode = msgspec.msgpack.Encoder().encode


@attrs.frozen(eq=False)
class _Rate:
    """How one handle changes from run to run.

    Attributes:
        step: By how much it is expected to change.
        is_steady: Whether it changed by that twice in a row.
        other: By how much it changed last, if that was something else.
    """

    step: int = 0
    is_steady: bool = False
    other: int | None = None

    def after(self, step: int) -> _Rate:
        """Return the rate after a change by ``step``."""
        if step == self.step:
            return self if self.is_steady and self.other is None else _Rate(step, is_steady=True)
        if self.is_steady and step != self.other:
            return _Rate(self.step, is_steady=True, other=step)
        return _Rate(step, is_steady=self.is_steady)


_UNKNOWN = _Rate()


@attrs.frozen(eq=False)
class _Handles:
    """The handles of one field of the last run, and the expected ones.

    Attributes:
        last: The last ones.
        rates: How each changes.
        expected: The next ones.
        is_steady: Whether all changed as expected, and steadily.
    """

    last: tuple[int, ...]
    rates: tuple[_Rate, ...]
    expected: tuple[int, ...]
    is_steady: bool = False

    @classmethod
    def of(cls, handles: tuple[int, ...]) -> _Handles:
        """Begin with the handles of the first run."""
        return cls(handles, (_UNKNOWN,) * len(handles), handles)

    def after(self, handles: tuple[int, ...]) -> _Handles:
        """Return the same after one more run."""
        if len(handles) != len(self.last):
            return self.of(handles)
        rates, is_steady = self.rates, self.is_steady
        if not is_steady or handles != self.expected:
            rates = tuple([rate.after(new - old) for rate, old, new in zip(rates, self.last, handles, strict=True)])
            is_steady = all(rate.is_steady and rate.other is None for rate in rates)
        elif handles == self.last:
            return self
        expected = tuple([handle + rate.step for handle, rate in zip(handles, rates, strict=True)])
        return _Handles(handles, rates, expected, is_steady)


@attrs.define(eq=False)
class _Course:
    """The run history and the prediction of one program.

    Attributes:
        run: The last run.
        numbers: Its encoded numbers. Equal bytes mean equal numbers; ``==`` would not distinguish zeros by sign.
        expected: The predicted next run.
        fields: The handles of its fields.
        is_even: Whether the prediction repeats the numbers of the last run.
    """

    run: Run
    numbers: bytes
    expected: Run
    fields: tuple[_Handles, _Handles, _Handles]
    is_even: bool = True

    @classmethod
    def of(cls, run: Run, numbers: bytes) -> _Course:
        """Begin with the first run."""
        return cls(run, numbers, run, (_Handles.of(run.inputs), _Handles.of(run.outputs), _Handles.of(run.released)))

    def follow(self, run: Run, numbers: bytes) -> None:
        """Add the next run, with its encoded numbers."""
        self.is_even = numbers == self.numbers
        inputs, outputs, released = self.fields
        inputs, outputs, released = self.fields = (
            inputs.after(run.inputs), outputs.after(run.outputs), released.after(run.released))
        self.expected = Run(
            run.program, inputs.expected, run.numbers if self.is_even else _next(self.run.numbers, run.numbers),
            outputs.expected, released.expected)
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
            self._courses[run.program] = _Course.of(run, numbers)
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


def _next(old: Any, new: Any) -> Any:
    """Extrapolate whole numbers and equally long lists of them; return other values unchanged."""
    if type(old) is int and type(new) is int:
        return 2 * new - old
    if type(old) is float and type(new) is float and old != new and _is_whole(old) and _is_whole(new):
        # A length that something is divided by, or raised to a power.
        return 2 * new - old
    if type(old) is list and type(new) is list and len(old) == len(new):
        return list(starmap(_next, zip(old, new, strict=True)))
    return new


def _is_whole(number: float) -> bool:
    return abs(number) < _EXACT and number.is_integer()


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
