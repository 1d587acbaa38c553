"""Rates per second, from the difference of two readings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import attrs

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.server.kinds.metrics import ProgramTime
from djinn_plugins.watch.monitor.reading import Reading, TenantReading, name_of

__all__ = ("ProgramRates", "TenantRates", "programs_between", "quantile_s", "rows_between")


@attrs.frozen
class TenantRates:
    """The activity of a tenant.

    Attributes:
        tenant: Label.
        sessions, handles, held_bytes: Current amounts.
        requests_per_s, bytes_per_s: In both directions together, between two readings.
        device_part: Fraction of the time in which its programs ran, between two readings; above 1 if several run at
            once.
        wait_p99_s: 99th percentile of the wait of programs for their turns, as below.
        p99_s: 99th percentile of the duration of requests; ``None`` without requests, infinite beyond the largest
            bound.
        restarts: Since the server began.
        pressure_tier: Tier of memory pressure: 0, 1 or 2.
    """

    tenant: str
    sessions: int
    requests_per_s: float
    bytes_per_s: float
    held_bytes: int
    handles: int
    device_part: float
    wait_p99_s: float | None
    p99_s: float | None
    restarts: int
    pressure_tier: int


@attrs.frozen
class ProgramRates:
    """How long a program of a tenant ran.

    Attributes:
        tenant: Label.
        name, phase: Of the program; the phase is empty if its client does not know it.
        runs_per_s: Between two readings.
        device_part: Fraction of the time in which it ran, between two readings.
        total_s, mean_s, longest_s: Of all runs since the server began.
    """

    tenant: str
    name: str
    phase: str
    runs_per_s: float
    device_part: float
    total_s: float
    mean_s: float
    longest_s: float


def programs_between(before: Reading, now: Reading) -> list[ProgramRates]:
    """Return a row for each program that took much time, those that did between the readings first."""
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    known = {(tenant, each.name, each.phase): each for tenant, programs in before.programs.items() for each in programs}
    rows = [_program(name_of(tenant, now.tenants), each, known.get((tenant, each.name, each.phase)), elapsed_s)
            for tenant, programs in now.programs.items() for each in programs]
    return sorted(rows, key=lambda row: (-row.device_part, -row.total_s))


def _program(tenant: str, now: ProgramTime, before: ProgramTime | None, elapsed_s: float) -> ProgramRates:
    # One that was not among the slowest before, or that is counted anew, has no rates yet.
    last = now if before is None or before.runs > now.runs else before
    return ProgramRates(tenant, now.name, "" if now.phase is ExecutionPhase.UNKNOWN else now.phase.value,
                        (now.runs - last.runs) / elapsed_s, (now.total_ns - last.total_ns) / 1e9 / elapsed_s,
                        now.total_ns / 1e9, now.total_ns / 1e9 / max(now.runs, 1), now.longest_ns / 1e9)


def rows_between(before: Reading, now: Reading) -> list[TenantRates]:
    """Return a row for each tenant, in order, and a row for the sum if there are several."""
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    pairs = [(tenant, before.tenants.get(tenant, TenantReading()), found)
             for tenant, found in sorted(now.tenants.items())]
    rows = [_row(name_of(tenant, now.tenants), old, new, elapsed_s) for tenant, old, new in pairs]
    return [*rows, _row("(total)", _together(before), _together(now), elapsed_s)] if len(rows) > 1 else rows


def quantile_s(durations: Mapping[float, int], part: float) -> float | None:
    """Estimate a quantile of durations, assuming a uniform distribution within each interval of bounds.

    Args:
        durations: Number of durations up to each bound, in order.
        part: Of 1.
    """
    total = max(durations.values(), default=0)
    if not total:
        return None
    below, least = 0, 0.0
    for bound, count in durations.items():
        if count >= part * total:
            return bound if math.isinf(bound) else least + (bound - least) * (part * total - below) / (count - below)
        below, least = count, bound
    return math.inf


def _row(tenant: str, before: TenantReading, now: TenantReading, elapsed_s: float) -> TenantRates:
    requests, requests_before = sum(now.requests.values()), sum(before.requests.values())
    moved, moved_before = (reading.received_bytes + reading.sent_bytes for reading in (now, before))
    if requests < requests_before or moved < moved_before:
        # The server was restarted in between, and its counters began again.
        return _row(tenant, TenantReading(), now, elapsed_s)
    return TenantRates(tenant, now.sessions, (requests - requests_before) / elapsed_s,
                       (moved - moved_before) / elapsed_s, now.held_bytes, now.handles,
                       max(0.0, now.device_s - before.device_s) / elapsed_s,
                       quantile_s(_since(before.waits, now.waits), 0.99),
                       quantile_s(_since(before.durations, now.durations), 0.99), sum(now.restarts.values()),
                       now.pressure_tier)


def _since(before: Mapping[float, int], now: Mapping[float, int]) -> dict[float, int]:
    return {bound: max(0, count - before.get(bound, 0)) for bound, count in now.items()}


def _added(counts: Iterable[Mapping[float, int]]) -> dict[float, int]:
    total: Counter[float] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))


def _together(reading: Reading) -> TenantReading:
    found = list(reading.tenants.values())
    return TenantReading(
        sessions=sum(one.sessions for one in found), handles=sum(one.handles for one in found),
        held_bytes=sum(one.held_bytes for one in found),
        requests={"": sum(sum(one.requests.values()) for one in found)},
        durations=_added(one.durations for one in found), waits=_added(one.waits for one in found),
        device_s=sum(one.device_s for one in found),
        received_bytes=sum(one.received_bytes for one in found), sent_bytes=sum(one.sent_bytes for one in found),
        restarts={"": sum(sum(one.restarts.values()) for one in found)},
        pressure_tier=max((one.pressure_tier for one in found), default=0))
