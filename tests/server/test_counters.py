"""The books of what workers count, without processes."""

from __future__ import annotations

import math
import threading

import msgspec
import pytest

from djinn.errors import ProtocolError, ProtocolVersionError, RemoteTimeoutError, TransportError
from djinn_plugins.server.control import ControlMessage
from djinn_plugins.server.counters import Meters, Reporter, WorkerReport
from djinn_plugins.server.kinds.metrics import BUCKETS_S, Amounts, Counts
from djinn_plugins.server.metrics_store import MAX_TENANTS, OTHERS, MetricsStore
from djinn_plugins.watch.monitor.rates import quantile_s, rows_between
from djinn_plugins.watch.monitor.reading import Reading, TenantReading


class CountedChannel:
    bytes_sent = 0
    bytes_received = 0


def test_what_a_connection_has_counted_stays_when_it_ends() -> None:
    meters = Meters()
    channel = CountedChannel()
    meter = meters.open(channel)
    meter.answered("ok", 2_000_000)
    meter.answered("failed", int(60e9))
    meter.refused()
    channel.bytes_sent, channel.bytes_received = 10, 20
    meters.open(object()).answered("ok", 0)
    meters.reject("token")
    before = meters.counts()
    meters.close(meter)
    channel.bytes_sent = 99
    assert meters.counts() == before
    assert before.requests == {"ok": 2, "failed": 1, "refused": 1}
    assert (before.sent_bytes, before.received_bytes, before.duration_ns) == (10, 20, 60_002_000_000)
    assert {bound: count for bound, count in zip((*BUCKETS_S, math.inf), before.durations, strict=True) if count} == {
        BUCKETS_S[0]: 1, 0.0025: 1, math.inf: 1}
    assert before.rejections == {"token": 1}


def test_errors_are_counted_by_kind_and_lost_connections_are_none() -> None:
    meters = Meters()
    for error in (ProtocolError("x"), ProtocolError("y"), ProtocolVersionError("x"), RemoteTimeoutError("x"),
                  TransportError("x"), RuntimeError("x")):
        meters.ended(error)
    assert meters.counts().faults == {"malformed": 2, "version": 1, "timeout": 1}


def report(requests: int, handles: int = 0) -> WorkerReport:
    return WorkerReport(Counts({"ok": requests}), Amounts(handles=handles))


def test_counts_go_on_with_the_next_worker_and_amounts_do_not() -> None:
    ledger = MetricsStore()
    first = ledger.open("alice", 5)
    first.heed(report(10, handles=7))
    assert ledger.totals()["alice"].amounts.handles == 7
    ledger.close(first)
    ledger.restarted("alice", "SIGKILL")
    between = ledger.totals()["alice"]
    assert (between.counts.requests, between.amounts, between.workers) == ({"ok": 10}, Amounts(), 0)
    second = ledger.open("alice", 5)
    second.heed(report(1, handles=2))
    found = ledger.totals()["alice"]
    assert (found.counts.requests, found.amounts.handles, found.workers) == ({"ok": 11}, 2, 1)
    assert (found.restarts, found.limit_bytes) == ({"SIGKILL": 1}, 5)


def test_a_worker_cannot_make_a_count_fall() -> None:
    ledger = MetricsStore()
    account = ledger.open("", 0)
    told = Counts({"ok": 10}, (1,) * (len(BUCKETS_S) + 1), 7, sent_bytes=5)
    account.heed(WorkerReport(told, Amounts()))
    account.heed(WorkerReport(Counts(), Amounts()))
    assert ledger.totals()[""].counts == told


@pytest.mark.parametrize("spoilt", [
    {"counts": {"requests": {"x" * 100: 1}}}, {"counts": {"sent_bytes": -1}}, {"counts": {"duration_ns": 2**63}},
    {"counts": {"durations": [1]}}, {"counts": {"rejections": {"mine": 1}}}, {"amounts": {"sessions": 0.5}},
    {"programs": 11 * [["sum", "unknown", 1, 1, 1]]}, {"programs": [["x" * 121, "unknown", 1, 1, 1]]},
    {"programs": [["sum", "mine", 1, 1, 1]]}, {"programs": [["sum", "unknown", 1, -1, 1]]}])
def test_a_worker_can_make_no_label(spoilt: dict[str, object]) -> None:
    decoder = msgspec.msgpack.Decoder(ControlMessage)
    message = {"type": "report", "counts": {}, "amounts": {}}
    assert decoder.decode(msgspec.msgpack.encode(message)) == WorkerReport(Counts(), Amounts())
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(message | spoilt))


def test_tenants_beyond_the_cap_share_a_label() -> None:
    ledger = MetricsStore()
    for number in range(MAX_TENANTS + 5):
        ledger.open(f"t{number}", 1).heed(report(1, handles=1))
    ledger.restarted("t104", "exit")
    found = ledger.totals()
    assert len(found) == MAX_TENANTS + 1
    assert (found[OTHERS].workers, found[OTHERS].amounts.handles, found[OTHERS].counts.requests) == (5, 5, {"ok": 5})
    assert found[OTHERS].restarts == {"exit": 1}


def test_a_reporter_tells_what_has_changed_and_a_last_time() -> None:
    told: list[WorkerReport] = []
    now = report(1)
    twice = threading.Event()
    looks = 0

    def look() -> WorkerReport:
        nonlocal looks
        looks += 1
        if looks == 3:
            twice.set()
        return now

    reporter = Reporter(look, told.append, 0.01)
    reporter.start()
    assert twice.wait(10)
    now = report(2)
    reporter.stop()
    assert told == [report(1), report(2)]


def reading(at_s: float, **tenants: TenantReading) -> Reading:
    return Reading(at_s, "", {}, {}, tenants)


def test_rates_are_between_two_looks_and_a_new_server_counts_anew() -> None:
    before = TenantReading(requests={"ok": 100}, received_bytes=1000, durations={0.1: 100, math.inf: 100})
    after = TenantReading(requests={"ok": 110, "failed": 10}, received_bytes=3000, sent_bytes=2000,
                          durations={0.1: 100, 0.2: 120, math.inf: 120})
    (row,) = rows_between(reading(10, alice=before), reading(12, alice=after))
    assert (row.requests_per_s, row.bytes_per_s) == (10, 2000)
    assert row.p99_s == pytest.approx(0.199)
    (row,) = rows_between(reading(10, alice=after), reading(12, alice=TenantReading(requests={"ok": 4})))
    assert row.requests_per_s == 2
    *_, total = rows_between(reading(0), reading(1, alice=before, bob=after))
    assert (total.tenant, total.requests_per_s) == ("(total)", 220)


def test_a_quantile_lies_where_its_bounds_say() -> None:
    assert quantile_s({}, 0.99) is None
    assert quantile_s({1.0: 0, math.inf: 0}, 0.99) is None
    assert quantile_s({1.0: 0, 2.0: 100, math.inf: 100}, 0.5) == 1.5
    assert quantile_s({1.0: 98, math.inf: 100}, 0.99) == math.inf
    assert quantile_s({1.0: 100, math.inf: 100}, 0.99) == pytest.approx(0.99)
