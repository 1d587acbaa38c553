"""Lookahead: what will most likely be asked for next is done while there is nothing else to do.

A loop asks for the same programs in the same order, and each of their runs goes on as the ones before let expect. So
the executor's side need not wait until it is asked: while a client thinks, or its message is on the way, the next
programs run ahead. Only pure programs do: they write nothing and draw nothing, so nobody can tell when they ran. What
they read may change before they are asked for; therefore what was run ahead is dropped as soon as anything else is
asked for than what was expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from djinn.errors import ProtocolError
from djinn.wire.forecast import Forecast
from djinn.wire.messages import Rerun, Run

CONFIDENT = 3
"""How many times in a row a program must have followed another, as forecast, to be run ahead."""
MAX_AHEAD = 32
"""Runs that are ahead at most. They hold as much memory as the same runs would when they are asked for."""


@attrs.frozen
class _Ahead:
    """A run that nobody has asked for yet, and its results."""

    run: Run
    outputs: list[Any]


class Lookahead:
    """What one session has run ahead.

    Attributes:
        hits: Runs that had been run ahead when they were asked for.
        misses: Runs that were run ahead and dropped.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._followers: dict[int, tuple[int, int]] = {}
        self._last = 0
        self._ahead: deque[_Ahead] = deque()
        self.hits = 0
        self.misses = 0

    def asked(self, command: Run | Rerun) -> list[Any] | None:
        """Learn which run is asked for; the forecast must not know of it yet.

        Returns:
            Its results, if it was run ahead.
        """
        is_expected = type(command) is Rerun and command == Rerun(command.program)
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
        """All results that nobody has asked for."""
        return (output for ahead in self._ahead for output in ahead.outputs)

    def drop(self) -> None:
        """Forget what was run ahead: something may have changed what it has read."""
        self.misses += len(self._ahead)
        self._ahead.clear()

    def freed(self, handles: Iterable[int]) -> None:
        """Learn that values are gone; what was run ahead may have read them."""
        gone = set(handles)
        if any(not gone.isdisjoint(ahead.run.inputs) for ahead in self._ahead):
            self.drop()

    def forget(self, program: int) -> None:
        """Learn that a program is gone, or means something else."""
        self._followers.pop(program, None)

    @property
    def is_certain(self) -> bool:
        """Whether what follows the last run has followed it often enough."""
        return self._next()[1] >= CONFIDENT

    def _next(self) -> tuple[int, int]:
        return self._followers.get(self._ahead[-1].run.program if self._ahead else self._last, (0, 0))

    def go(self, value_of: Callable[[int], Any], run: Callable[[Run, list[Any]], list[Any] | None]) -> bool:
        """Run one more program ahead, if it is as good as certain which.

        Args:
            value_of: Gives the value of a handle, ``None`` if there is none.
            run: Runs a program on values; gives its results, or ``None`` if it cannot be run ahead.

        Returns:
            Whether something was run.
        """
        before = self._ahead[-1].run.program if self._ahead else self._last
        program, times = self._next()
        if times < CONFIDENT or len(self._ahead) >= MAX_AHEAD:
            return False
        if any(ahead.run.program == program for ahead in self._ahead):
            # Of each program, one run is forecast.
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
