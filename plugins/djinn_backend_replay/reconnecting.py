"""Finds servers again after a connection is lost."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import attrs
from djinn_lib_interrupts.interrupts import sleep, through

from djinn.errors import DjinnError, TokenEndedError, TransportError
from djinn.kinds import Connection

log = logging.getLogger("djinn.recovery")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
_random = random.SystemRandom()


@attrs.define(eq=False)
class Reconnector:
    """Reconnects to the servers of a session, or to those that are left.

    Attributes:
        addresses: Their addresses.
        open: Connects to an address; an empty address stands for an executor in this process.
        timeout_s: How long servers may take to come back.
        fills_up: Whether every place needs a connection; a remaining server then also takes the missing places.
        falls_back: Whether an executor in this process may take over if no server comes back.
        fallbacks: How often that has happened.
    """

    addresses: Sequence[str]
    open: Callable[[str], Connection]
    timeout_s: float
    fills_up: bool
    falls_back: bool
    fallbacks: int = 0

    def connect(self) -> list[Connection]:
        """Connect to each server, and retry until the time is over.

        Raises:
            TransportError: No server came back.
        """
        found: list[Connection | None] = [None] * len(self.addresses)
        try:
            return self._connected(found)
        except BaseException:
            for connection in found:
                if connection is not None:
                    connection.close()
            raise

    def _connected(self, found: list[Connection | None]) -> list[Connection]:
        deadline = time.monotonic() + self.timeout_s
        pause_s, reason = FIRST_PAUSE_S, ""
        while True:
            for index, address in enumerate(self.addresses):
                if found[index] is None:
                    try:
                        found[index] = through(partial(self.open, address))
                    except TokenEndedError:
                        # Waiting does not make the token valid again.
                        raise
                    except DjinnError as error:
                        reason = error.summary
            left_s = deadline - time.monotonic()
            if None not in found or left_s <= 0:
                break
            sleep(min(left_s, pause_s * _random.uniform(0.5, 1)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self._filled(found, reason)

    def _filled(self, found: list[Connection | None], reason: str) -> list[Connection]:
        reached = [connection for connection in found if connection is not None]
        if not reached:
            return [self._fallback(reason)]
        if len(reached) < len(found) and self.fills_up:
            others = [connection.address for connection in reached]
            for index, connection in enumerate(found):
                if connection is None:
                    log.warning("%s does not answer; %s does its work as well", self.addresses[index],
                                others[index % len(others)])
                    found[index] = self.open(others[index % len(others)])
            return [connection for connection in found if connection is not None]
        return reached

    def _fallback(self, reason: str) -> Connection:
        if not self.falls_back or (self.fills_up and len(self.addresses) > 1):
            raise TransportError(
                f"No server came back within {self.timeout_s:g} s: {reason.rstrip('.')}.",
                hint="Start one there, then call djinn.init() to start a new session; recovery_timeout_s says how "
                     "long to wait.")
        self.fallbacks += 1
        log.warning("no server came back within %g s: operations run in this process from now on", self.timeout_s)
        return self.open("local://")
