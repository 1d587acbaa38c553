"""Looks whether servers are back that a session continues without."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from djinn.errors import DjinnError
from djinn.kinds import Connection
from djinn_plugins.common.interrupts import through

log = logging.getLogger("djinn.recovery")

EVERY_S = 5.0
"""Shortest time between two looks."""
SHARE = 0.05
"""Fraction of the time that looks may take: to connect to a machine that is gone takes as long as the time limit."""


class ReturnWatch:
    """Looks for servers that a session continues without, at moments when the session waits anyway.

    Args:
        connect: Connects to an address.
        clock: Returns the time in seconds.
    """

    def __init__(self, connect: Callable[[str], Connection], clock: Callable[[], float] = monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._missing = deque[str]()
        self._next_s = 0.0

    def watch(self, addresses: Sequence[str]) -> None:
        """Look for these servers and for no others."""
        self._missing = deque(addresses)
        self._next_s = self._clock() + EVERY_S

    @property
    def is_due(self) -> bool:
        """Whether to look now."""
        return bool(self._missing) and self._clock() >= self._next_s

    def look(self, take: Callable[[Connection], None]) -> str:
        """Connect to one of the missing servers, and use the connection; another one is next.

        Args:
            take: Uses it. If it raises, the connection is closed.

        Returns:
            The server's address; empty if it is not back, or cannot be used.
        """
        began_s = self._clock()
        address = self._missing[0]
        self._missing.rotate(-1)
        try:
            self._use(through(partial(self._connect, address)), take)
        except DjinnError as error:
            log.debug("%s does not take part again: %s", address, error.summary)
            return ""
        finally:
            ended_s = self._clock()
            self._next_s = ended_s + max(EVERY_S, (ended_s - began_s) / SHARE)
        self._missing.remove(address)
        return address

    @staticmethod
    def _use(connection: Connection, take: Callable[[Connection], None]) -> None:
        try:
            take(connection)
        except BaseException:
            connection.close()
            raise
