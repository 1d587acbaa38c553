"""Forecasts: what repeats, or goes on as it began, need not travel.

A loop runs the same programs again and again, and what varies from one run to the next mostly varies evenly: handles
rise by as many values as a round makes, weights keep theirs, a length grows by one. So both sides expect of a program's
next run what continues its last two, and a run that is known to both up to a few places travels as those places.

Both sides make the forecast from the same runs in the same order, so neither needs to be told what it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any

import attrs
import msgspec

from djinn.errors import ProtocolError
from djinn.wire.messages import Rerun, Run

MAX_HANDLE = 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode


@attrs.define(eq=False)
class _Course:
    """How the runs of one program go on.

    Attributes:
        run: The last one.
        numbers: Its numbers, encoded: equal bytes are the same numbers, which equality does not tell of zeros.
        expected: The next one, if it goes on evenly.
        is_even: Whether it is expected to have the numbers of the last.
    """

    run: Run
    numbers: bytes
    expected: Run
    is_even: bool = True

    def follow(self, run: Run, numbers: bytes) -> None:
        """Take in the next run, and its encoded numbers."""
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

    def shortened(self, run: Run, numbers: bytes) -> Run | Rerun:
        """Say in what a run is not as expected; it travels whole if that is most of it."""
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
        return Rerun(run.program, inputs, changed, outputs, released)

    def completed(self, rerun: Rerun) -> Run:
        """Make the run that is as expected but for what travelled."""
        expected = self.expected
        return Run(
            rerun.program,
            tuple(_changed(expected.inputs, rerun.inputs)),
            _changed(expected.numbers, rerun.numbers),
            tuple(_changed(expected.outputs, rerun.outputs)),
            tuple(_changed(expected.released, rerun.released)),
        )


class Forecast:
    """What one side expects of the runs of a session's programs.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._courses: dict[int, _Course] = {}

    def shorten(self, run: Run) -> Run | Rerun:
        """Return the shorter form of a run that is about to be sent, and take the run in."""
        course, numbers = self._courses.get(run.program), _encode(run.numbers)
        short = run if course is None else course.shortened(run, numbers)
        self._take_in(run, numbers)
        return short

    def complete(self, command: Run | Rerun) -> Run:
        """Return the run that was meant, and take it in.

        Raises:
            ProtocolError: There was no run to go on from, or what would come of it is none.
        """
        run = command if isinstance(command, Run) else self._continued(command)
        self._take_in(run, _encode(run.numbers))
        return run

    def expected(self, program: int) -> Run:
        """Return the next run of a program, if it goes on as expected.

        Raises:
            ProtocolError: As for `complete`.
        """
        return self._continued(Rerun(program))

    def _continued(self, command: Rerun) -> Run:
        course = self._courses.get(command.program)
        if course is None:
            raise ProtocolError(f"Program {command.program} has not been run, so nothing goes on.")
        run = course.completed(command)
        for handles in (run.inputs, run.outputs, run.released):
            if handles and not 0 <= min(handles) <= max(handles) <= MAX_HANDLE:
                raise ProtocolError(f"A run of program {command.program} would go on to handles that do not exist.")
        return run

    def _take_in(self, run: Run, numbers: bytes) -> None:
        course = self._courses.get(run.program)
        if course is None:
            self._courses[run.program] = _Course(run, numbers, run)
        else:
            course.follow(run, numbers)

    def forget(self, programs: Iterable[int]) -> None:
        """Let go of programs that will not run again."""
        for program in programs:
            self._courses.pop(program, None)


def _continued(before: Sequence[int], last: tuple[int, ...]) -> tuple[int, ...]:
    if before == last or len(before) != len(last):
        return last
    return tuple([2 * new - old for old, new in zip(before, last, strict=True)])


def _next(old: Any, new: Any) -> Any:
    """Continue integers, and lists of as many integers; everything else stays."""
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
    """Whether two numbers are the same to the last bit, and of one type."""
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
