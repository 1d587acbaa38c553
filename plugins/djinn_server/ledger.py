"""The gateway's books of what its workers have told, which go on when a worker is followed by another one."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from djinn_server.counting import Amounts, Counts, Meters, Report, added, merged
from djinn_server.placement import Load

__all__ = ("MAX_TENANTS", "OTHERS", "Account", "Ledger", "TenantTotals")

MAX_TENANTS = 100
"""Tenants that have a label of their own; a label is a series, and series cost whoever keeps them."""
RECENT_S = 5.0
"""What was wanted longer ago than this counts for less and less where load is compared."""
OTHERS = "(other)"
"""Label of all others together; no tenant can be called so."""


@attrs.frozen
class TenantTotals:
    """What is known of one label's workers.

    Attributes:
        counts: What all of them have counted.
        amounts: What there is now.
        limit_bytes: What the sessions should hold at most; 0 if nobody says.
        workers: How many serve.
        restarts: How many were followed by another one, by why.
    """

    counts: Counts
    amounts: Amounts
    limit_bytes: int
    workers: int
    restarts: dict[str, int]


class Account:
    """What one worker has told.

    A worker is in the hands of its tenant. So what it tells can make no series, and nothing smaller than it was.

    Attributes:
        label: Whose it is.
        limit_bytes: What its sessions should hold at most; 0 if nobody says.
        device: Position of the device that it uses.
        counts: The latest.
        amounts: The latest.

    Concurrency:
        `heed` is called by one thread.
    """

    def __init__(self, label: str, limit_bytes: int, device: int = 0) -> None:
        self.label = label
        self.limit_bytes = limit_bytes
        self.device = device
        self._wanted = 0.0
        self._heeded_s = time.monotonic()
        self.counts = Counts()
        self.amounts = Amounts()

    def heed(self, report: Report) -> None:
        """Enter what the worker tells."""
        before, now = self.counts, time.monotonic()
        self.counts, self.amounts = merged(max, before, report.counts), report.amounts
        wanted_s = (self.counts.device_ns + self.counts.wait_ns - before.device_ns - before.wait_ns) / 1e9
        self._wanted = self.wanted(now) + wanted_s / RECENT_S
        self._heeded_s = now

    def wanted(self, now: float) -> float:
        """Return how many devices' time the worker wanted lately."""
        return self._wanted * math.exp((self._heeded_s - now) / RECENT_S)


class Ledger:
    """The books of all tenants, and of the gateway itself.

    Attributes:
        gateway: Counts what happens before it is known whose it is.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self.gateway = Meters()
        self._lock = threading.Lock()
        self._past: dict[str, Counts] = {}
        self._restarts: dict[str, Counter[str]] = {}
        self._accounts: dict[Account, None] = {}

    def open(self, tenant: str, limit_bytes: int, device: int = 0) -> Account:
        """Begin the account of a worker that serves."""
        with self._lock:
            account = Account(self._label(tenant), limit_bytes, device)
            self._accounts[account] = None
        return account

    def close(self, account: Account) -> None:
        """End the account of a worker; what it has counted stays."""
        with self._lock:
            del self._accounts[account]
            self._past[account.label] = added((self._past[account.label], account.counts))

    def restarted(self, tenant: str, cause: str) -> None:
        """Enter that a worker is followed by another one, which nobody has asked for.

        Args:
            tenant: Whose it is.
            cause: A signal's name, ``exit`` or ``start``.
        """
        with self._lock:
            self._restarts[self._label(tenant)][cause] += 1

    def totals(self) -> dict[str, TenantTotals]:
        """Add everything up, by label."""
        with self._lock:
            accounts = list(self._accounts)
            past = dict(self._past)
            restarts = {label: dict(causes) for label, causes in self._restarts.items()}
        found = {}
        for label, before in past.items():
            own = [account for account in accounts if account.label == label]
            found[label] = TenantTotals(
                added((before, *(account.counts for account in own))),
                _sum(account.amounts for account in own), sum(account.limit_bytes for account in own), len(own),
                restarts[label])
        return found

    def loads(self, workers: Sequence[int]) -> list[Load]:
        """Say how much there is to do on each device, given how many workers it has."""
        now = time.monotonic()
        with self._lock:
            accounts = list(self._accounts)
        return [Load(sum(account.wanted(now) for account in accounts if account.device == device),
                     sum(account.amounts.held_bytes for account in accounts if account.device == device), count)
                for device, count in enumerate(workers)]

    def _label(self, tenant: str) -> str:
        label = tenant if tenant in self._past or len(self._past) < MAX_TENANTS else OTHERS
        self._past.setdefault(label, Counts())
        self._restarts.setdefault(label, Counter())
        return label


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    total = Amounts()
    for each in amounts:
        total = Amounts(
            total.sessions + each.sessions, total.handles + each.handles, total.held_bytes + each.held_bytes,
            total.kept_bytes + each.kept_bytes,
            {kind: total.memory.get(kind, 0) + each.memory.get(kind, 0) for kind in {**total.memory, **each.memory}},
            max(total.pressure_tier, each.pressure_tier))
    return total
