"""Tickets and limits, without a network."""

from __future__ import annotations

import threading
import time

import pytest

from djinn.errors import LimitError, RefusedError
from djinn_plugins.server import limits, tickets
from djinn_plugins.server.limits import Allowances
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tickets import KEY_BYTES, TicketCheck, issue

KEY = bytes(range(KEY_BYTES))


def test_a_ticket_is_good_once_here_and_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    check = TicketCheck(KEY)
    first, second, third = issue(KEY), issue(KEY), issue(KEY)
    assert len({first, second, third}) == 3
    check.redeem(first)
    with pytest.raises(RefusedError):
        check.redeem(first)
    with pytest.raises(RefusedError):
        TicketCheck(bytes(KEY_BYTES)).redeem(second)
    now = time.monotonic_ns()
    monkeypatch.setattr(tickets.time, "monotonic_ns", lambda: now + 29 * 10**9)
    check.redeem(second)
    monkeypatch.setattr(tickets.time, "monotonic_ns", lambda: now + 31 * 10**9)
    with pytest.raises(RefusedError):
        check.redeem(third)
    with pytest.raises(RefusedError):
        check.redeem(first)
    assert len(check._used) <= 1


def test_no_other_text_is_a_ticket() -> None:
    check, good = TicketCheck(KEY), issue(KEY)
    for position in range(len(good)):
        other = "0" if good[position] != "0" else "1"
        with pytest.raises(RefusedError):
            check.redeem(good[:position] + other + good[position + 1:])
    for text in ("", "0", "zz", good[2:], good + "00", good[:32], "\udcff", "é" * 80):
        with pytest.raises(RefusedError):
            check.redeem(text)
    check.redeem(good)


def test_one_ticket_to_many_at_once_lets_one_in() -> None:
    check, ticket = TicketCheck(KEY), issue(KEY)
    let_in: list[int] = []
    start = threading.Barrier(8)

    def attempt(number: int) -> None:
        start.wait()
        try:
            check.redeem(ticket)
        except RefusedError:
            return
        let_in.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(let_in) == 1


def test_values_of_all_sessions_count_together_and_come_back() -> None:
    allowances = Allowances(Limits(handles=10))
    first, second = allowances.open(), allowances.open()
    first.admit_values(0, 6)
    second.admit_values(0, 4)
    with pytest.raises(LimitError, match="11 values; the limit for all sessions is 10"):
        second.admit_values(4, 1)
    first.settle(5)
    second.admit_values(4, 1)
    first.close()
    second.admit_values(5, 5)
    with pytest.raises(LimitError):
        second.admit_values(10, 1)
    allowances.limits = Limits(handles=11)
    second.admit_values(10, 1)


def test_tensors_on_their_way_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    allowances = Allowances(Limits(inflight_bytes=100))
    first, second = allowances.open(), allowances.open()
    with pytest.raises(LimitError, match="101 bytes; the limit is 100"):
        first.admit_body(101)
    first.admit_body(60)
    admitted = threading.Event()

    def bring() -> None:
        second.admit_body(50)
        admitted.set()

    thread = threading.Thread(target=bring)
    thread.start()
    assert not admitted.wait(0.2)
    first.settle(0)
    assert admitted.wait(5)
    thread.join()
    monkeypatch.setattr(limits, "WAIT_S", 0.1)
    with pytest.raises(LimitError, match="50 are being taken in"):
        first.admit_body(60)
    second.close()
    first.admit_body(60)


def test_nothing_is_refused_without_limits() -> None:
    allowances = Allowances(Limits())
    sessions = [allowances.open() for _ in range(1000)]
    sessions[0].admit_body(2**60)
    sessions[1].admit_values(0, 2**60)
