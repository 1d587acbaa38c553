"""How busy the executors of a fleet are with other sessions' work, as they said last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from djinn_lib_service.device_report import FIRST_REPORT, LOAD_HANDLE, load_in

from djinn.ir.value import Slot
from djinn.kinds import Connection
from djinn.session.single_backend import SingleBackend

__all__ = ("REFRESH_S", "FleetLoads")

REFRESH_S = 1.0
"""How old a load is when an executor is asked for it again, together with values."""
_QUESTION = Slot(LOAD_HANDLE, FIRST_REPORT)


class FleetLoads:
    """Asks executors for their load, with requests that wait for an answer in any case.

    Args:
        connections: To the executors. Until one is asked, other sessions at the time of its greeting count.
        are_read: Whether the placement of the session reads them; otherwise no executor is asked.

    Concurrency:
        The caller holds the session's lock.
    """

    def __init__(self, connections: Sequence[Connection], *, are_read: bool) -> None:
        sessions = [connection.welcome.sessions for connection in connections]
        self._loads = [count / (count + 1) for count in sessions]
        self._asked_s = [float("-inf")] * len(sessions)
        self._are_read = are_read

    def of(self, executor: int) -> float:
        """Return the fraction of the time in which an executor is busy with other sessions' work."""
        return self._loads[executor]

    def fetch(self, executor: int, link: SingleBackend, slots: Sequence[Slot]) -> list[Any]:
        """Fetch values of an executor, and its load if the last one is old."""
        if not self._is_old(executor):
            return link.fetch(slots, whole=True)
        now = time.monotonic()
        *values, told = link.fetch([*slots, _QUESTION], whole=True)
        self._asked_s[executor] = now
        self._loads[executor] = load_in(told, link.address)
        return values

    def refresh(self, links: Sequence[SingleBackend]) -> None:
        """Ask executors whose last load is old."""
        for executor, link in enumerate(links):
            if self._is_old(executor):
                self.fetch(executor, link, ())

    def _is_old(self, executor: int) -> bool:
        return self._are_read and time.monotonic() - self._asked_s[executor] >= REFRESH_S
