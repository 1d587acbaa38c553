"""Finds servers again after a connection is lost."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

import attrs

from djinn.errors import DjinnError, TokenEndedError, TransportError
from djinn.kinds import Connection
from djinn_plugins.common.interrupts import sleep, through
from djinn_plugins.replay.returning import ReturnWatch

log = logging.getLogger("djinn.recovery")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
HERE = "local://"
"""Address of an executor in this process."""
_REPLACED = "%s does not answer; %s does its work as well"
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
        failover_s: How long servers may take to come back while another one answers, which can do their work.
        returning: Looks for the servers that the last connections leave out.
    """

    addresses: Sequence[str]
    open: Callable[[str], Connection]
    timeout_s: float
    fills_up: bool
    falls_back: bool
    fallbacks: int = 0
    failover_s: float = 5.0
    returning: ReturnWatch = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.returning = ReturnWatch(self.open)

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
        began_s = monotonic()
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
            is_replaced = found.count(None) < len(found)
            patience_s = min(self.timeout_s, self.failover_s) if is_replaced else self.timeout_s
            left_s = began_s + patience_s - monotonic()
            if None not in found or left_s <= 0:
                break
            sleep(min(left_s, pause_s * _random.uniform(0.5, 1)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self._filled(found, reason)

    def _filled(self, found: list[Connection | None], reason: str) -> list[Connection]:
        reached = [connection for connection in found if connection is not None]
        self.returning.watch(())
        if not reached:
            return [self._fallback(reason)]
        if len(reached) < len(found) and self.fills_up:
            others = [connection.address for connection in reached]
            for index, connection in enumerate(found):
                if connection is None:
                    log.warning(_REPLACED, self.addresses[index], others[index % len(others)])
                    found[index] = self.open(others[index % len(others)])
            return [connection for connection in found if connection is not None]
        self.returning.watch([address for address, connection in zip(self.addresses, found, strict=True)
                              if connection is None])
        return reached

    def _fallback(self, reason: str) -> Connection:
        if not self.falls_back or (self.fills_up and len(self.addresses) > 1):
            raise TransportError(
                f"No server came back within {self.timeout_s:g} s: {reason.rstrip('.')}.",
                hint="Start one there, then call djinn.init() to start a new session; recovery_timeout_s says how "
                     "long to wait.")
        self.fallbacks += 1
        log.warning("no server came back within %g s: operations run in this process from now on", self.timeout_s)
        return self.open(HERE)


def find_another(addresses: Sequence[str], missing: str, open_connection: Callable[[str], Connection]) -> str | None:
    """Return the first of a session's other servers that answers; ``None`` if none does."""
    for address in dict.fromkeys(addresses):
        if address != missing:
            try:
                open_connection(address).close()
            except DjinnError:
                continue
            log.warning(_REPLACED, missing, address)
            return address
    return None
