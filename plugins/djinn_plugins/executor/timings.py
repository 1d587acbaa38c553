"""When the commands of a session were executed: programs by the device's own clock, if it computes asynchronously."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, TypeVar

import attrs
import msgspec

from djinn.wire.messages import Command, Receive, Result, Run, RunDelta, Send, Timing, Upload
from djinn_plugins.common.kinds.executor import DeviceMark, Executor, SupportsDeviceMarks, SupportsSettling
from djinn_plugins.executor.pauses import paused_ns

__all__ = ("Timings",)

MAX_TIMINGS = 10_000
"""Most timings remembered between two answers; the latest are kept."""
_T = TypeVar("_T")


@attrs.frozen
class _Submitted:
    """A program that a device may still be computing.

    Attributes:
        program: Its number.
        first, last: The marks around its work.
        paused_ns: How long it gave way to others in between.
    """

    program: int
    first: DeviceMark
    last: DeviceMark
    paused_ns: int


class Timings:
    """When commands were executed.

    A program on an asynchronous device returns when it is submitted. Two marks enclose its work. Once the device has
    reached the second one, their distance from an earlier mark, whose time is known, tells when the program ran. Of one
    that gave way to others, the pauses are left out: it is reported to end as much earlier.

    Args:
        executor: Runs the programs.
        attempt: Calls a function and records its failure for the client.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, executor: Executor, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        self._pending: deque[Timing | _Submitted] = deque(maxlen=MAX_TIMINGS)
        self._attempt = attempt
        self._settle = executor.settle if isinstance(executor, SupportsSettling) else lambda: None
        self._mark = executor.mark if isinstance(executor, SupportsDeviceMarks) else None
        self._ran: tuple[int, DeviceMark | None, DeviceMark | None, int] | None = None
        """When the last program began, the marks around it, and how long it paused, until its command has ended."""
        if self._mark is not None:
            attempt(self._settle)
        # A device that has nothing to do reaches a mark at once.
        self._known, self._known_ns = self._marked(), monotonic_ns()

    def of(self, run: Callable[[], _T]) -> _T:
        """Run a program, whose turn it is."""
        begin_ns, first = monotonic_ns(), self._marked()
        before_ns = paused_ns()
        try:
            return run()
        finally:
            self._ran = begin_ns, first, self._marked(), paused_ns() - before_ns

    def add(self, command: Command, begin_ns: int) -> None:
        """Record the end of a command, if its kind is reported."""
        end_ns = monotonic_ns()
        if isinstance(command, (Run, RunDelta)):
            self._pending.append(self._program(command.program, begin_ns, end_ns))
        elif isinstance(command, Send):
            self._pending.append(Timing("send", command.transfer, begin_ns, end_ns))
        elif isinstance(command, Receive):
            self._pending.append(Timing("receive", command.transfer, begin_ns, end_ns))
        elif isinstance(command, Upload):
            self._pending.append(Timing("upload", command.handle, begin_ns, end_ns))

    def added_to(self, result: Result, *, waits: bool) -> Result:
        """Return an answer with the timings since the last call.

        Args:
            result: The answer.
            waits: Whether to wait for what the device still computes; the next answer tells of it otherwise.
        """
        if waits and any(isinstance(item, _Submitted) for item in self._pending):
            self._attempt(self._settle)
        taken: list[Timing] = []
        while self._pending and (timing := self._timing(self._pending[0])) is not None:
            taken.append(timing)
            self._pending.popleft()
        return msgspec.structs.replace(result, timings=tuple(taken), now_ns=monotonic_ns())

    def _program(self, program: int, begin_ns: int, end_ns: int) -> Timing | _Submitted:
        """Return what is known of a program. One that ran before it was requested takes no time."""
        ran, self._ran = self._ran, None
        if ran is None:
            return Timing("run", program, begin_ns, end_ns)
        began_ns, first, last, gave_way_ns = ran
        if self._known is None or first is None or last is None:
            return Timing("run", program, began_ns, end_ns - gave_way_ns)
        return _Submitted(program, first, last, gave_way_ns)

    def _timing(self, item: Timing | _Submitted) -> Timing | None:
        """Return a timing; ``None`` if the device has not finished."""
        if isinstance(item, Timing):
            return item
        try:
            if self._known is None or not item.last.query():
                return None
            begin_ns = self._known_ns + int(self._known.elapsed_time(item.first) * 1e6)
            end_ns = begin_ns + int(item.first.elapsed_time(item.last) * 1e6)
        except RuntimeError:
            self._lose()
            return None
        # Distances are numbers of few digits, so they are measured from a mark nearby.
        self._known, self._known_ns = item.last, end_ns
        return Timing("run", item.program, begin_ns, end_ns - item.paused_ns)

    def _marked(self) -> DeviceMark | None:
        if self._mark is None:
            return None
        try:
            return self._mark()
        except RuntimeError:
            self._lose()
            return None

    def _lose(self) -> None:
        """Stop measuring: the device is lost, which others report."""
        self._mark = self._known = None
        self._pending = deque((item for item in self._pending if isinstance(item, Timing)), MAX_TIMINGS)
