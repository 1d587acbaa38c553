"""How far the submission of programs is ahead of a device that computes asynchronously.

The device cannot be given to another worker before it has computed what was submitted. So where workers take turns, a
program whose steps take the device longer than the host waits between two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from djinn_plugins.common.kinds.executor import DeviceMark

__all__ = ("AHEAD_S", "Backlog")

AHEAD_S = 0.01
"""How much work of a device may be submitted ahead; a step that takes longer is not divided."""
_LEAST_S = 1e-6


class Backlog:
    """What one session has submitted and the device has not computed.

    While the device keeps up, `step` is called every few milliseconds. Once it does not, `step` is called before each
    step, and waits.

    Args:
        mark: Marks a point in the device's work; ``None`` if the device is lost.

    Attributes:
        is_long: Whether the device does not keep up.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, mark: Callable[[], DeviceMark | None]) -> None:
        self._mark = mark
        self._marks: deque[tuple[DeviceMark, int]] = deque()
        """The last mark that the device has reached, and those that it has not; each with the steps before it."""
        self._steps = 0
        """Steps since the last mark."""
        self._step_s = AHEAD_S
        """How long the device took for a step between the last two marks that it has reached."""
        self.is_long = False

    def step(self) -> None:
        """Wait as long as too much is submitted."""
        self._steps += 1
        # A mark costs the device as much as a small step.
        if self.is_long and self._steps * self._step_s < AHEAD_S / 4:
            return
        if (made := self._mark()) is None:
            self.clear()
            return
        self._marks.append((made, self._steps))
        self._steps = 0
        try:
            self._keep_up()
        except RuntimeError:
            # The device is lost, which others report.
            self.clear()

    def clear(self) -> None:
        """Forget what was submitted: the device has computed it, or never will."""
        self._marks.clear()
        self.is_long = False

    def _keep_up(self) -> None:
        while len(self._marks) > 1 and self._marks[1][0].query():
            self._reached()
        self.is_long = len(self._marks) > (1 if self.is_long else 2)
        while self.is_long and len(self._marks) > 2 and self._ahead_s() > AHEAD_S:
            self._marks[1][0].synchronize()
            self._reached()

    def _ahead_s(self) -> float:
        return self._step_s * sum(steps for _, steps in list(self._marks)[1:])

    def _reached(self) -> None:
        first, _ = self._marks.popleft()
        last, steps = self._marks[0]
        self._step_s = max(_LEAST_S, first.elapsed_time(last) / 1e3 / steps)
