"""Speculator: the executor's side runs the most likely next programs while it is idle.

A loop requests the same programs in the same order, and earlier runs predict later ones. So the executor's side need
not wait for the request: while the client computes, or its message is in flight, the next programs run ahead. Only pure
programs do: they write nothing and draw no random numbers, so it cannot be observed when they ran. Their inputs may
change before the client requests the run; therefore all runs ahead are dropped as soon as the client requests anything
other than the predicted run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from djinn.errors import ProtocolError
from djinn.wire.messages import Run, RunDelta
from djinn_lib_service.delta import RunPredictor

CONFIDENT = 3
"""How many times in a row one program must have followed another, as predicted, before it runs ahead."""
MAX_AHEAD = 32
"""Most runs that can be ahead. They use as much memory as the same runs would after a request."""


@attrs.frozen
class _Ahead:
    """A run that the client has not requested yet, and its results."""

    run: Run
    outputs: list[Any]


class Speculator:
    """The programs that one session has run ahead.

    Attributes:
        hits: Runs that had already run ahead when the client requested them.
        misses: Runs that ran ahead and were dropped.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, forecast: RunPredictor) -> None:
        self._forecast = forecast
        self._followers: dict[int, tuple[int, int]] = {}
        self._last = 0
        self._ahead: deque[_Ahead] = deque()
        self.hits = 0
        self.misses = 0

    def asked(self, command: Run | RunDelta) -> list[Any] | None:
        """Process a requested run; call this before the forecast sees the run.

        Returns:
            Its results, if the run is already ahead.
        """
        is_expected = type(command) is RunDelta and command == RunDelta(command.program)
        follower, times = self._followers.get(self._last, (0, 0))
        times = times + 1 if is_expected and follower == command.program else 0
        self._followers[self._last] = command.program, times
        self._last = command.program
        if not self._ahead:
            return None
        if not is_expected or self._ahead[0].run.program != command.program:
            self.drop()
            return None
        self.hits += 1
        return self._ahead.popleft().outputs

    @property
    def results(self) -> Iterator[Any]:
        """All results of runs that the client has not requested."""
        return (output for ahead in self._ahead for output in ahead.outputs)

    def drop(self) -> None:
        """Drop all runs ahead, because their inputs may have changed."""
        self.misses += len(self._ahead)
        self._ahead.clear()

    def freed(self, handles: Iterable[int]) -> None:
        """Drop all runs ahead if one of them may have read a freed value."""
        gone = set(handles)
        if any(not gone.isdisjoint(ahead.run.inputs) for ahead in self._ahead):
            self.drop()

    def forget(self, programs: Iterable[int]) -> None:
        """Forget what follows programs that were dropped or redefined."""
        for program in programs:
            self._followers.pop(program, None)

    @property
    def is_certain(self) -> bool:
        """Whether the same program has followed the last run often enough."""
        return self._next()[1] >= CONFIDENT

    def _next(self) -> tuple[int, int]:
        return self._followers.get(self._ahead[-1].run.program if self._ahead else self._last, (0, 0))

    def go(self, value_of: Callable[[int], Any], run: Callable[[Run, list[Any]], list[Any] | None]) -> bool:
        """Run one more program ahead, if the prediction is confident enough.

        Args:
            value_of: Returns the value of a handle, or ``None`` if there is none.
            run: Runs a program on values; returns its results, or ``None`` if it cannot run ahead.

        Returns:
            Whether a program was run.
        """
        before = self._ahead[-1].run.program if self._ahead else self._last
        program, times = self._next()
        if times < CONFIDENT or len(self._ahead) >= MAX_AHEAD:
            return False
        if any(ahead.run.program == program for ahead in self._ahead):
            # The forecast covers only one run of each program.
            return False
        try:
            expected = self._forecast.expected(program)
        except ProtocolError:
            return False
        inputs = [self._value(handle, value_of) for handle in expected.inputs]
        if any(value is None for value in inputs):
            return False
        outputs = run(expected, inputs)
        if outputs is None:
            self._followers[before] = program, 0
            return False
        self._ahead.append(_Ahead(expected, outputs))
        return True

    def _value(self, handle: int, value_of: Callable[[int], Any]) -> Any:
        for ahead in reversed(self._ahead):
            if handle in ahead.run.released:
                return None
            if handle in ahead.run.outputs:
                return ahead.outputs[ahead.run.outputs.index(handle)]
        return value_of(handle)
