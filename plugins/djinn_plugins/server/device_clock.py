"""How long an asynchronous device computes for each owner.

A program on such a device returns when it is submitted. Two marks enclose its work, one before and one behind it. The
time between them is known when the device has reached the second one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.common.kinds.executor import DeviceMark

__all__ = ("DeviceClock", "DeviceSpan")

LOOK_S = 0.005
"""How often to look what the device has finished, while it works."""
_Owner = TypeVar("_Owner")
_log = logging.getLogger("djinn.server")


@attrs.define(eq=False)
class DeviceSpan(Generic[_Owner]):
    """A program that was submitted.

    Attributes:
        owner: Whose it is.
        first, last: The marks around it.
        host_s: How long submitting it took.
        since_ns: From when on the device may have worked on it, by the monotonic clock.
        program: Its name and phase.
        is_part: Whether it is the part of the program before a pause.
    """

    owner: _Owner
    first: DeviceMark
    last: DeviceMark
    host_s: float
    since_ns: int
    program: tuple[str, ExecutionPhase]
    is_part: bool = False


class DeviceClock(Generic[_Owner]):
    """The programs that a device has not finished.

    Args:
        mark: Marks a point in the device's work.

    Concurrency:
        The caller holds a lock whenever it calls a method, except for `watch`.
    """

    def __init__(self, mark: Callable[[], DeviceMark]) -> None:
        self._mark = mark
        self._spans: deque[DeviceSpan[_Owner]] = deque()
        self._works = threading.Event()
        self._is_lost = False
        self.is_fed = False
        """Whether a program is being submitted that `watch` is to look at."""

    def mark(self) -> DeviceMark | None:
        """Mark a point; ``None`` if the device is lost."""
        if self._is_lost:
            return None
        try:
            return self._mark()
        except RuntimeError as error:
            self._lose(error)
            return None

    def add(self, span: DeviceSpan[_Owner]) -> None:
        """Add a program that was submitted."""
        if not self._is_lost:
            self._spans.append(span)
            self._works.set()

    def feed(self) -> None:
        """Have `watch` look while a program is submitted, until ``is_fed`` is set back."""
        self.is_fed = True
        self._works.set()

    @property
    def oldest(self) -> DeviceSpan[_Owner] | None:
        """What the device works on; ``None`` if it has finished everything."""
        return self._spans[0] if self._spans else None

    def finished(self) -> list[tuple[DeviceSpan[_Owner], float]]:
        """Return the programs that the device has finished since the last call, and its seconds for each."""
        found: list[tuple[DeviceSpan[_Owner], float]] = []
        try:
            while self._spans and self._spans[0].last.query():
                span = self._spans.popleft()
                found.append((span, span.first.elapsed_time(span.last) / 1e3))
        except RuntimeError as error:
            self._lose(error)
        if found and self._spans:
            self._spans[0].since_ns = time.monotonic_ns()
        if not (self._spans or self.is_fed):
            self._works.clear()
        return found

    def watch(self, look: Callable[[], bool]) -> None:
        """Call a function again and again while the device works, until it returns false."""
        while True:
            self._works.wait()
            time.sleep(LOOK_S)
            if not look():
                return

    def stop(self) -> None:
        """Wake what watches."""
        self._works.set()

    def _lose(self, error: RuntimeError) -> None:
        _log.info("the device's time is no longer measured: %s", error)
        self._is_lost = True
        self._spans.clear()
