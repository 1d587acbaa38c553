"""Limits of a tenant that has several workers, each with its own end of what they use together."""

from __future__ import annotations

import os
import threading

import pytest

from djinn.errors import LimitError
from djinn_plugins.server import limits
from djinn_plugins.server.limits import Allowances, SessionAllowance
from djinn_plugins.server.run_queue import RunQueue
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenant_use import Amount, TenantUse, WorkerUse


def workers(given: Limits, count: int = 2) -> tuple[TenantUse, list[Allowances]]:
    use = TenantUse()
    return use, [Allowances(given, use=WorkerUse.of(os.dup(use.descriptor), use.take())) for _ in range(count)]


def test_sessions_and_values_of_all_workers_count_together_and_a_dead_worker_uses_nothing() -> None:
    use, (first, second) = workers(Limits(sessions=2, handles=10))
    one, other = first.open(), second.open()
    for each in (first, second):
        with pytest.raises(LimitError, match="2 sessions already; the limit is 2"):
            each.open()
    one.admit_values(0, 6)
    assert other.most_values() == 4
    with pytest.raises(LimitError, match="11 values; the limit for all sessions is 10"):
        other.admit_values(0, 5)
    other.admit_values(0, 4)
    one.settle(5)
    other.admit_values(4, 1)
    # The first worker dies, with all it had.
    use.free(0)
    other.admit_values(5, 5)
    second.open()


def test_bytes_that_another_worker_takes_in_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (first, second) = workers(Limits(inflight_bytes=100))
    one, other = first.open(), second.open()
    one.admit_body(60)
    admitted = threading.Event()

    def bring() -> None:
        other.admit_body(50)
        admitted.set()

    thread = threading.Thread(target=bring)
    thread.start()
    assert not admitted.wait(0.1)
    one.settle(0)
    assert admitted.wait(5)
    thread.join()
    monkeypatch.setattr(limits, "WAIT_S", 0.05)
    with pytest.raises(LimitError, match="brings 60 bytes, 50 are being taken in"):
        one.admit_body(60)


def test_no_two_workers_get_the_last_part() -> None:
    _, found = workers(Limits(sessions=3), 8)
    for _ in range(20):
        start, opened = threading.Barrier(len(found)), list[SessionAllowance]()

        def begin(each: Allowances) -> None:
            start.wait()  # noqa: B023  # joined in this round
            try:
                opened.append(each.open())  # noqa: B023
            except LimitError:
                return

        threads = [threading.Thread(target=begin, args=(each,)) for each in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(opened) <= 3
        for allowance in opened:
            allowance.close()
    assert found[0].use.others(Amount.SESSIONS) == 0


def test_queues_of_all_workers_count_when_a_session_begins() -> None:
    _, (first, second) = workers(Limits())
    given = Limits(queued=3, wait_s=1.0)
    busy, line = (RunQueue(limits=lambda: given, use=each.use) for each in (first, second))
    line.check()
    busy.queued = 3
    with pytest.raises(LimitError, match="3 programs wait already; the limit is 3"):
        line.check()
    busy.queued = 2
    line.check()
    first.use.put(Amount.WAIT_NS, 2 * 10**9)
    with pytest.raises(LimitError, match="some 2 s; the limit is 1 s"):
        line.check()


def test_numbers_that_a_worker_makes_up_lift_no_limit() -> None:
    use, (first, second) = workers(Limits(sessions=1))
    first.open()
    cells = use._cells
    cells[1 + Amount.SESSIONS * (len(cells) // len(Amount)) + 5] = -(2**62)
    cells[0] = 2**62
    with pytest.raises(LimitError):
        second.open()
