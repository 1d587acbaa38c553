"""Interfaces that a session uses: turns at the device, and an allowance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Turns(Protocol):
    """Controls when a session may use the device.

    Attributes:
        program: Name of the program that runs; set between `begin` and `end`.
        breaks: Why the running program is to stop or pause before its next step; see
            `djinn_plugins.common.kinds.executor.SupportsPause`.
    """

    program: str
    breaks: list[BaseException]

    def begin(self) -> None:
        """Wait until a program may run.

        Raises:
            LimitError: Too many sessions are waiting already.
            TransportError: No more programs will run.
        """

    def end(self) -> None:
        """Mark the program as finished; called once after each `begin` that has returned."""

    def load(self) -> float:
        """Return the fraction of the last seconds, from 0 to below 1, in which others had the device."""


class Allowance(Protocol):
    """Limits what a session may request."""

    def steps_beyond(self, steps: int) -> Mapping[int, Exception]:
        """Return by position which of a program's steps are too many, and why."""

    def most_values(self) -> int:
        """Return how many values the session may hold, as long as other sessions hold what they hold now."""

    def admit_values(self, held: int, more: int) -> None:
        """Admit ``more`` values to a session that holds ``held`` values.

        Raises:
            LimitError: The session would hold too many values. They are not created, and commands that use them fail.
        """


