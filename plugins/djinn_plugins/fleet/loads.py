"""How busy the executors of a fleet are with other sessions' work, as they said last."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from djinn.ir.value import Slot
from djinn.kinds import Connection
from djinn.session.single_backend import SingleBackend
from djinn_plugins.common.device_report import FIRST_REPORT, LOAD_HANDLE, load_in

__all__ = ("REFRESH_S", "REVISIT_S", "FleetLoads")

REFRESH_S = 1.0
"""How old a load is when an executor is asked for it again, together with values."""
REVISIT_S = 5.0
"""How old the load of an executor is when it is asked for nothing else, because it was busy and work went to others. A
load is that of the last seconds, so an answer that comes sooner would tell little.
"""
QUIET_S = 10.0
"""An executor that was sent no operation for so long is assumed to have finished, although it was not asked."""
FEW_NODES = 100
"""An executor that was sent no more operations than this since its last answer can soon answer again."""
LEVELS = 4
"""Number of levels of load; work is placed anew when an executor reaches another one."""
_QUESTION = Slot(LOAD_HANDLE, FIRST_REPORT)
_LONG_AGO = float("-inf")


class FleetLoads:
    """Asks executors for their load, with requests that wait for an answer in any case.

    Args:
        connections: To the executors. Until one is asked, other sessions at the time of its greeting count.
        are_read: Whether the placement of the session reads them; otherwise no executor is asked.

    Concurrency:
        The caller holds the session's lock.
    """

    def __init__(self, connections: Sequence[Connection], *, are_read: bool) -> None:
        self._loads: list[float] = []
        self._asked_s: list[float] = []
        self._sent: list[tuple[int, float]] = []
        """By executor: how many operations it was sent, and when that was noticed; long ago if they are answered."""
        self._are_read = are_read
        self._links: Sequence[SingleBackend] = ()
        for connection in connections:
            self.add(connection)

    def use(self, links: Sequence[SingleBackend]) -> None:
        """Ask the executors through these links, of which there may be more later."""
        self._links = links

    def add(self, connection: Connection) -> None:
        """Track another executor, too."""
        sessions = connection.welcome.sessions
        self._loads.append(sessions / (sessions + 1))
        self._asked_s.append(_LONG_AGO)
        self._sent.append((0, _LONG_AGO))

    def of(self, executor: int) -> float:
        """Return the fraction of the time in which an executor is busy with other sessions' work."""
        return self._loads[executor]

    def level_of(self, executor: int) -> int:
        """Return its load in levels; 0 for hardly any."""
        return round(LEVELS * self._loads[executor])

    def fetch(self, executor: int, link: SingleBackend, slots: Sequence[Slot]) -> list[Any]:
        """Fetch values of an executor, and its load if the last one is old."""
        is_asked = self._is_old(executor, REFRESH_S)
        values = link.fetch([*slots, _QUESTION] if is_asked else slots, whole=True)
        if is_asked:
            self._asked_s[executor] = monotonic()
            self._loads[executor] = load_in(values.pop(), link.address)
        self.answered(executor, link)
        return values

    def answered(self, executor: int, link: SingleBackend) -> None:
        """Note that an executor has finished its work."""
        self._sent[executor] = link.nodes_sent, _LONG_AGO

    def refresh(self) -> None:
        """Ask executors whose last load is old."""
        for executor, link in enumerate(self._links):
            if self._is_old(executor, REFRESH_S):
                self.fetch(executor, link, ())

    def renew(self) -> None:
        """Ask as `refresh` does, unless the first executor has much to do before it can answer."""
        if self._links[0].nodes_sent - self._sent[0][0] <= FEW_NODES:
            self.refresh()

    def revisit(self) -> None:
        """Ask one of the executors that work avoids because they were busy, so that it gets work again.

        One that still works for this session is left out: its answer would come after that work.
        """
        for executor in sorted(range(len(self._links)), key=self._asked_s.__getitem__):
            link = self._links[executor]
            if self.level_of(executor) and self._is_old(executor, REVISIT_S) and self._is_quiet(executor, link):
                self.fetch(executor, link, ())
                return

    def _is_old(self, executor: int, age_s: float) -> bool:
        return self._are_read and monotonic() - self._asked_s[executor] >= age_s

    def _is_quiet(self, executor: int, link: SingleBackend) -> bool:
        now = monotonic()
        if link.nodes_sent != self._sent[executor][0]:
            self._sent[executor] = link.nodes_sent, now
        return now - self._sent[executor][1] >= QUIET_S
