"""The gateway's statistics of its workers, which continue when a worker is replaced."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from djinn_plugins.server.counters import Meters, WorkerReport, added, merged
from djinn_plugins.server.kinds.metrics import Amounts, Counts, ProgramTime, TenantTotals
from djinn_plugins.server.log_lines import printable
from djinn_plugins.server.placement import DeviceLoad
from djinn_plugins.server.program_times import summed
from djinn_plugins.server.recent import RECENT_S, RecentSum
from djinn_plugins.server.tenants import session_digest

__all__ = ("MAX_TENANTS", "OTHERS", "Account", "MetricsStore")

MAX_TENANTS = 100
"""Maximum number of tenants with their own label. Each label is a time series, and series are costly to store."""
OTHERS = "(other)"
"""Label shared by all other tenants; no tenant can have this name."""


class Account:
    """The reports of one worker.

    A tenant may control its worker. Therefore a report can neither create series nor decrease a counter.

    Attributes:
        label: Label of its tenant.
        limit_bytes: Memory limit of its sessions; 0 if there is none.
        device: Position of the device that it uses.
        counts: The latest counters.
        amounts: The latest amounts.
        programs: The programs that took the most time.
        named: What stands for its named sessions, and when each began; see `TenantTotals.named`.
        is_spare: Whether no owner has the worker yet; it does not count then.
        charged_to_others: Returns how many bytes of its kept uploads are charged to the workers that share them.

    Concurrency:
        `heed` is called by one thread.
    """

    def __init__(self, label: str, limit_bytes: int, device: int = 0, tenant: str = "") -> None:
        self.label = label
        self._tenant = tenant
        self._names: tuple[tuple[str, int], ...] = ()
        self.named: tuple[tuple[str, int], ...] = ()
        self.limit_bytes = limit_bytes
        self.device = device
        self.is_spare = False
        self._wanted = RecentSum()
        self.counts = Counts()
        self.amounts = Amounts()
        self.programs: tuple[ProgramTime, ...] = ()
        self.charged_to_others: Callable[[], int] = _nothing

    def heed(self, report: WorkerReport) -> None:
        """Record a report of the worker."""
        before, now = self.counts, time.monotonic()
        self.counts, self.amounts = merged(max, before, report.counts), report.amounts
        self.programs = tuple(msgspec.structs.replace(program, name=printable(program.name))
                              for program in report.programs)
        if report.named != self._names:
            # The tenant is not the worker's to choose.
            self._names = report.named
            self.named = tuple((session_digest(self._tenant, name), began_s) for name, began_s in report.named)
        wanted_s = (self.counts.device_ns + self.counts.wait_ns - before.device_ns - before.wait_ns) / 1e9
        self._wanted.add(wanted_s, now)

    def has(self, tenant: str, digest: str) -> str:
        """Return the name of a tenant's session by what stands for it; empty if the worker has none."""
        return next((name for (name, _), (found, _) in zip(self._names, self.named, strict=True)
                     if found == digest and self._tenant == tenant), "")

    def charged(self) -> Amounts:
        """Return the latest amounts, with its part of the uploads that it shares with other workers."""
        kept_bytes = max(0, self.amounts.kept_bytes - self.charged_to_others())
        return msgspec.structs.replace(self.amounts, kept_bytes=kept_bytes)

    def wanted(self, now: float) -> float:
        """Return the worker's recent demand, in devices."""
        return self._wanted.at(now) / RECENT_S


class MetricsStore:
    """The statistics of all tenants, and of the gateway itself.

    Attributes:
        gateway: Counts events of connections whose tenant is not known yet.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self.gateway = Meters()
        self._lock = threading.Lock()
        self._past: dict[str, Counts] = {}
        self._past_programs: dict[str, tuple[ProgramTime, ...]] = {}
        self._restarts: dict[str, Counter[str]] = {}
        self._accounts: dict[Account, None] = {}

    def open(self, tenant: str, limit_bytes: int, device: int = 0) -> Account:
        """Open the account of a worker that has begun to serve."""
        with self._lock:
            account = Account(self._label(tenant), limit_bytes, device, tenant)
            self._accounts[account] = None
        return account

    def close(self, account: Account) -> None:
        """Close the account of a worker; its counters are kept."""
        with self._lock:
            del self._accounts[account]
            self._past[account.label] = added((self._past[account.label], account.counts))
            self._past_programs[account.label] = summed((self._past_programs[account.label], account.programs))

    def restarted(self, tenant: str, cause: str) -> None:
        """Count an unplanned restart of a worker.

        Args:
            tenant: The worker's tenant.
            cause: A signal's name, ``exit`` or ``start``.
        """
        with self._lock:
            self._restarts[self._label(tenant)][cause] += 1

    def totals(self) -> dict[str, TenantTotals]:
        """Return the totals by label."""
        with self._lock:
            accounts = list(self._accounts)
            past, past_programs = dict(self._past), dict(self._past_programs)
            restarts = {label: dict(causes) for label, causes in self._restarts.items()}
        found = {}
        for label, before in past.items():
            own = [account for account in accounts if account.label == label]
            found[label] = TenantTotals(
                added((before, *(account.counts for account in own))),
                _sum(account.charged() for account in own), sum(account.limit_bytes for account in own),
                sum(not account.is_spare for account in own),
                restarts[label], summed((past_programs[label], *(account.programs for account in own))),
                tuple(each for account in own for each in account.named))
        return found

    def session_named(self, tenant: str, digest: str) -> str:
        """Return the name of a tenant's session by what stands for it; empty if there is none."""
        with self._lock:
            accounts = list(self._accounts)
        return next(filter(None, (account.has(tenant, digest) for account in accounts)), "")

    def sessions(self) -> dict[str, int]:
        """Return the number of sessions by label."""
        with self._lock:
            accounts = list(self._accounts)
        found: Counter[str] = Counter()
        for account in accounts:
            found[account.label] += account.amounts.sessions
        return dict(found)

    def loads(self, workers: Sequence[int]) -> list[DeviceLoad]:
        """Return the load of each device, given its number of workers."""
        now = time.monotonic()
        with self._lock:
            accounts = list(self._accounts)
        return [DeviceLoad(sum(account.wanted(now) for account in accounts if account.device == device),
                           sum(account.amounts.held_bytes for account in accounts if account.device == device), count)
                for device, count in enumerate(workers)]

    def _label(self, tenant: str) -> str:
        label = tenant if tenant in self._past or len(self._past) < MAX_TENANTS else OTHERS
        self._past.setdefault(label, Counts())
        self._past_programs.setdefault(label, ())
        self._restarts.setdefault(label, Counter())
        return label


def _nothing() -> int:
    return 0


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    total = Amounts()
    for each in amounts:
        total = Amounts(
            total.sessions + each.sessions, total.handles + each.handles, total.held_bytes + each.held_bytes,
            total.kept_bytes + each.kept_bytes,
            {kind: total.memory.get(kind, 0) + each.memory.get(kind, 0) for kind in {**total.memory, **each.memory}},
            max(total.pressure_tier, each.pressure_tier), total.shared_bytes + each.shared_bytes)
    return total
