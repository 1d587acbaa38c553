"""Forecasts: repeated runs are delta-encoded against a prediction.

A loop runs the same programs again and again, and most fields that change between runs change at a constant rate:
handles rise by the number of values per iteration, weights keep their handles, a length grows by one. So both sides
extrapolate each program's next run from those before. A run that differs from the prediction in a few positions is sent
as those positions.

Where a loop begins anew, its handles jump once or twice, and then rise as they did before. A rate that has been seen
twice in a row is therefore kept until another one has been. What jumps is predicted by its origin instead: which
result of which earlier run it was when the same program last ran after the same other ones; see
`djinn_plugins.common.wire.run_history`. So from the third time on, even the first rounds of a loop are as predicted.

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
from djinn_plugins.common.wire.rates import HandleRate, Handles
from djinn_plugins.common.wire.run_history import Origin, RunHistory, with_origin

MAX_HANDLE = 2**64 - 1
MAX_CONTEXTS = 12
"""Sequences of programs that a program's runs are told apart by, if they ran before it."""
_EXACT = 2.0**50
"""Below this, sums and differences of whole real numbers are exact."""
_SEQUENCES = (list, tuple)
"""What a list of numbers is: a tuple where it was recorded, and a list where it was received."""
_encode = msgspec.msgpack.Encoder().encode


@attrs.frozen(eq=False)
class _Context:
    """How a program runs after certain other ones.

    Attributes:
        gap: How far its first result is from the last result before it.
        before: The numbers of the run before.
        numbers: The numbers of the run itself.
        inputs: The origins of its inputs.
        released: The origins of the handles that it releases.
    """

    gap: HandleRate
    before: list[Any]
    numbers: list[Any]
    inputs: tuple[tuple[Origin, ...], ...]
    released: tuple[tuple[Origin, ...], ...]


@attrs.define(eq=False)
class _Course:
    """The run history and the prediction of one program.

    Attributes:
        run: The last run.
        numbers: Its encoded numbers. Equal bytes mean equal numbers; ``==`` would not distinguish zeros by sign.
        after: The program that ran before it.
        even: The next run if everything continues at its rate.
        fields: The handles of its fields.
        is_repeating: Whether ``even`` repeats the numbers of the last run.
        was_even: Whether the last run continued those before at their rates.
        contexts: How it ran after other programs: by the last one, and by the last ones, which know better.
    """

    run: Run
    numbers: bytes
    after: int
    even: Run
    fields: tuple[Handles, Handles, Handles]
    is_repeating: bool = True
    was_even: bool = False
    contexts: dict[tuple[int, ...], _Context] = attrs.field(factory=dict)

    @classmethod
    def of(cls, run: Run, numbers: bytes, after: int) -> _Course:
        """Begin with the first run."""
        return cls(run, numbers, after, run,
                   (Handles.of(run.inputs), Handles.of(run.outputs), Handles.of(run.released)))

    def is_even(self, run: Run, numbers: bytes) -> bool:
        """Whether a run continues those before at their rates."""
        even = self.even
        return (run.inputs == even.inputs and run.outputs == even.outputs and run.released == even.released
                and (numbers == self.numbers if self.is_repeating else _is_same(even.numbers, run.numbers)))

    def follow(self, run: Run, numbers: bytes, after: int, *, is_even: bool) -> None:
        """Add the next run, with its encoded numbers."""
        self.is_repeating = numbers == self.numbers
        inputs, outputs, released = self.fields
        inputs, outputs, released = self.fields = (
            inputs.after(run.inputs), outputs.after(run.outputs), released.after(run.released))
        self.even = Run(
            run.program, inputs.expected,
            run.numbers if self.is_repeating else _continued(run.numbers, self.run.numbers, run.numbers),
            outputs.expected, released.expected)
        self.run, self.numbers, self.after, self.was_even = run, numbers, after, is_even

    def learn(self, run: Run, history: RunHistory) -> None:
        """Learn the origins of a run that was not as predicted; call this before `follow` and `RunHistory.add`."""
        origin_of = history.origin_of
        released = list(map(origin_of, run.released))
        before = self.run.inputs if len(self.run.inputs) == len(run.inputs) else (None,) * len(run.inputs)
        # What stays, stays for another reason than who made it: a weight.
        stays = [handle == last for handle, last in zip(run.inputs, before, strict=True)]
        inputs = [None if stay else origin_of(handle) for handle, stay in zip(run.inputs, stays, strict=True)]
        step = run.outputs[0] - history.top if run.outputs else 0
        for key in {history.recent[-1:]: None, history.recent: None}:
            context = self.contexts.pop(key, None)
            self.contexts[key] = _Context(
                HandleRate(step, is_steady=True) if context is None else context.gap.after(step),
                self.run.numbers, run.numbers,
                _learned(() if context is None else context.inputs, inputs, stays),
                _learned(() if context is None else context.released, released, [False] * len(released)))
        while len(self.contexts) > MAX_CONTEXTS:
            del self.contexts[next(iter(self.contexts))]

    def expected(self, history: RunHistory) -> Run:
        """Return the predicted next run."""
        if self.was_even and history.is_even and history.program == self.after:
            return self.even
        context = self.contexts.get(history.recent) or self.contexts.get(history.recent[-1:])
        if context is None:
            return self.even
        even, handle_at = self.even, history.handle_at
        inputs = even.inputs
        if len(inputs) == len(context.inputs):
            inputs = tuple([handle_at(origins, handle) if origins else handle
                            for origins, handle in zip(context.inputs, inputs, strict=True)])
        outputs = even.outputs
        if outputs:
            shift = history.top + context.gap.step - self.run.outputs[0]
            outputs = tuple([handle + shift for handle in self.run.outputs])
        released = even.released if len(even.released) == len(context.released) else (0,) * len(context.released)
        released = tuple([handle_at(origins, handle)
                          for origins, handle in zip(context.released, released, strict=True)])
        return Run(even.program, inputs, _continued(self.run.numbers, context.before, context.numbers), outputs,
                   released)


class RunPredictor:
    """Predicts the runs of a session's programs, on one side of the connection.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._courses: dict[int, _Course] = {}
        self._history = RunHistory()

    def shorten(self, run: Run) -> Run | RunDelta:
        """Return the shorter form of a run that is about to be sent, and add the run to the history."""
        course, numbers = self._courses.get(run.program), _encode(run.numbers)
        expected = None if course is None else course.expected(self._history)
        self._take_in(run, numbers, expected)
        return run if expected is None else _shortened(expected, run)

    def complete(self, command: Run | RunDelta) -> Run:
        """Return the complete run that a command stands for, and add it to the history.

        Raises:
            ProtocolError: There is no earlier run to predict from, or the result is not a valid run.
        """
        course = self._courses.get(command.program)
        expected = None if course is None else course.expected(self._history)
        run = command if isinstance(command, Run) else _completed(expected, command)
        self._take_in(run, _encode(run.numbers), expected)
        return run

    def expected(self, program: int, history: RunHistory | None = None) -> Run:
        """Return the predicted next run of a program.

        Args:
            program: The program.
            history: What ran before, if that is more than what was requested.

        Raises:
            ProtocolError: As for `complete`.
        """
        course = self._courses.get(program)
        return _completed(None if course is None else course.expected(history or self._history), RunDelta(program))

    def _take_in(self, run: Run, numbers: bytes, expected: Run | None) -> None:
        course, history = self._courses.get(run.program), self._history
        if course is None:
            self._courses[run.program] = _Course.of(run, numbers, history.program)
            history.add(run.program, run.outputs, is_even=False)
            return
        is_even = course.is_even(run, numbers)
        if not (is_even if expected is None or expected is course.even else _is_equal(expected, run)):
            course.learn(run, history)
        course.follow(run, numbers, history.program, is_even=is_even)
        history.add(run.program, run.outputs, is_even=is_even)

    def forget(self, programs: Iterable[int]) -> None:
        """Drop the history of programs that will not run again."""
        for program in programs:
            self._courses.pop(program, None)
            self._history.forget(program)


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
        self._history: RunHistory | None = None

    def expected(self, program: int) -> Run:
        """Return the next run of a program, after those that `follow` added.

        Raises:
            ProtocolError: As for `RunPredictor.complete`.
        """
        course, history = self._courses.get(program), self._history
        if course is None or history is None:
            return self._predictor.expected(program, history)
        return _completed(course.expected(history), RunDelta(program))

    def follow(self, run: Run) -> None:
        """Add a run that `expected` has returned."""
        if self._history is None:
            self._history = RunHistory(self._predictor._history)
        course = self._courses.get(run.program)
        if course is None:
            course = self._courses[run.program] = attrs.evolve(self._predictor._courses[run.program])
        numbers = _encode(run.numbers)
        is_even = course.is_even(run, numbers)
        course.follow(run, numbers, self._history.program, is_even=is_even)
        self._history.add(run.program, run.outputs, is_even=is_even)

    def clear(self) -> None:
        """Return to the runs that were requested."""
        self._courses.clear()
        self._history = None


def _learned(
    known: tuple[tuple[Origin, ...], ...], origins: Sequence[Origin | None], stays: Sequence[bool]
) -> tuple[tuple[Origin, ...], ...]:
    if len(known) != len(origins):
        known = ((),) * len(origins)
    return tuple([old if stay else with_origin(old, origin)
                  for old, origin, stay in zip(known, origins, stays, strict=True)])


def _shortened(expected: Run, run: Run) -> Run | RunDelta:
    """Return the differences of a run from the expected one, or the whole run if most of it differs."""
    parts = ((expected.inputs, run.inputs), (expected.outputs, run.outputs), (expected.released, run.released))
    if any(len(one) != len(other) for one, other in (*parts, (expected.numbers, run.numbers))):
        return run
    inputs, outputs, released = starmap(_changes, parts)
    changed: dict[int, Any] = {place: new for place, (old, new)
                               in enumerate(zip(expected.numbers, run.numbers, strict=True)) if not _is_same(old, new)}
    told = len(inputs) + len(changed) + len(outputs) + len(released)
    if 2 * told > len(run.inputs) + len(run.numbers) + len(run.outputs) + len(run.released):
        return run
    return RunDelta(run.program, inputs, changed, outputs, released)


def _completed(expected: Run | None, command: RunDelta) -> Run:
    """Return the expected run with the received differences applied."""
    if expected is None:
        raise ProtocolError(f"Program {command.program} has not been run, so nothing goes on.")
    run = Run(
        command.program,
        tuple(_changed(expected.inputs, command.inputs)),
        _changed(expected.numbers, command.numbers),
        tuple(_changed(expected.outputs, command.outputs)),
        tuple(_changed(expected.released, command.released)),
    )
    for handles in (run.inputs, run.outputs, run.released):
        if handles and not 0 <= min(handles) <= max(handles) <= MAX_HANDLE:
            raise ProtocolError(f"A run of program {command.program} would go on to handles that do not exist.")
    return run


def _is_equal(expected: Run, run: Run) -> bool:
    return (run.inputs == expected.inputs and run.outputs == expected.outputs and run.released == expected.released
            and _is_same(expected.numbers, run.numbers))


def _continued(last: Any, old: Any, new: Any) -> Any:
    """Change ``last`` as ``old`` was changed to ``new``: whole numbers and equally long lists of them; else ``new``."""
    kind = type(new)
    if kind is int and type(old) is int and type(last) is int:
        return last + new - old
    if kind is float and type(old) is float and type(last) is float:
        if old != new and _is_whole(last) and _is_whole(old) and _is_whole(new):
            # A length that something is divided by, or raised to a power.
            return last + new - old
        return new
    if all(type(each) in _SEQUENCES for each in (last, old, new)) and len(last) == len(old) == len(new):
        return list(starmap(_continued, zip(last, old, new, strict=True)))
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
    if kind in _SEQUENCES and type(old) in _SEQUENCES:
        return len(old) == len(new) and all(starmap(_is_same, zip(old, new, strict=True)))
    if kind is not type(old):
        return False
    if kind is int:
        return bool(old == new)
    if kind is float:
        return bool(old == new) and math.copysign(1.0, old) == math.copysign(1.0, new)
    return _encode(old) == _encode(new)


def _changed(expected: Sequence[Any], changes: Mapping[int, Any]) -> list[Any]:
    made = list(expected)
    for place, new in changes.items():
        if place >= len(made):
            raise ProtocolError(f"A run changes place {place} of {len(made)}.")
        made[place] = new
    return made
