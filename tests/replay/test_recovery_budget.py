"""How much a recovery has to do again: the budget, what is measured, and what happens where it cannot be kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import djinn
from djinn.errors import TransportError
from djinn.kinds.backend_wrapper import unwrapped
from djinn.session.session import Session
from djinn.wire.messages import Result
from djinn_conformance.crashes import VirtualTime, let_die
from djinn_plugins.client.upload_dedup import after
from djinn_plugins.executor import reports
from djinn_plugins.replay import checkpointing, journal
from djinn_plugins.replay.budget import CHECKPOINT_SHARE, Budget

DEVICE = "remote_accelerator:0"
NODE_S, PIECE = 0.001, 32


def begin(budget_s: float, **more: Any) -> tuple[Session, VirtualTime]:
    session = djinn.init(recovery="replay", device="cpu", recovery_timeout_s=0.2, flush_every=PIECE,
                         log_level="WARNING", **more)
    clock = VirtualTime(NODE_S)
    clock.rule(unwrapped(session.backend), budget_s)
    return session, clock


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    yield
    djinn.shutdown()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "DJ319" in (text := record.getMessage())]


@given(
    pieces=st.lists(st.tuples(st.integers(1, 200), st.floats(1e-5, 2e-3), st.booleans(), st.integers(1, 40)),
                    min_size=50, max_size=300),
    takes_s=st.floats(0, 2), limit_s=st.floats(0.5, 5), pause_s=st.floats(0, 0.01))
@settings(deadline=None, max_examples=200)
def test_no_more_is_to_be_done_again_than_the_budget_or_ten_checkpoints(
    pieces: list[tuple[int, float, bool, int]], takes_s: float, limit_s: float, pause_s: float
) -> None:
    """A program of pieces, each with a number of operations, their time, whether it asks, and how many values live."""
    now_s = replay_s = fetching_s = node_s = unmeasured_s = 0.0
    unmeasured = 0
    budget = Budget(limit_s, now_s)
    for nodes, takes_each_s, asks, live in pieces * 3:
        if asks or budget.is_measurement_due(unmeasured, node_s, now_s):
            replay_s, node_s = replay_s + unmeasured_s, unmeasured_s / unmeasured if unmeasured else node_s
            unmeasured, unmeasured_s = 0, 0.0
            budget.measured()
        if not unmeasured and budget.is_look_due(replay_s, live, now_s) and budget.allows(takes_s, now_s):
            now_s, fetching_s, replay_s = now_s + takes_s, fetching_s + takes_s, 0.0
            budget.checkpointed(replay_s, now_s)
        budget.handed_over(now_s)
        unmeasured, unmeasured_s = unmeasured + nodes, unmeasured_s + nodes * takes_each_s
        now_s += nodes * takes_each_s + pause_s
        # Operations may take 200 times as long as those before, and nobody can know until they are measured.
        longest_s = limit_s / 4 + 200 * 2e-3
        assert replay_s + unmeasured_s <= max(limit_s, takes_s / CHECKPOINT_SHARE) + longest_s + 1e-6
    assert fetching_s <= CHECKPOINT_SHARE * now_s + 1e-6


def test_a_place_where_little_is_alive_is_waited_for_until_three_quarters() -> None:
    budget = Budget(4.0, 0.0)
    assert not budget.is_look_due(1.0, live=3, now_s=1)
    assert not budget.is_look_due(2.5, live=9, now_s=2)
    assert budget.is_look_due(2.6, live=3, now_s=2)
    assert budget.is_look_due(3.0, live=9, now_s=3)


def test_work_is_measured_that_overlaps_with_recording_and_that_nobody_waits_for() -> None:
    session, _ = begin(0.4)
    x = torch.ones(4, device=DEVICE)
    most = 0
    for _ in range(2000):
        x = x * 1.5 - 1
        most = max(most, unwrapped(session.backend).journal.node_count)
    assert djinn.stats()["checkpoints"] >= 4
    assert most <= 0.4 / NODE_S + 2 * PIECE
    assert djinn.stats()["journal_nodes"] == unwrapped(session.backend).journal.node_count <= most


def test_servers_tell_how_long_programs_ran_though_the_first_message_wants_no_answer() -> None:
    session = djinn.init(recovery="replay", device="cpu")
    kept = torch.ones(4, device=DEVICE) + 1
    djinn.flush()
    assert kept.tolist() == [2.0] * 4
    [meter] = unwrapped(session.backend)._meters
    assert meter.run_ns > 0


def test_a_failure_that_only_this_layer_has_waited_for_is_raised_at_the_next_wait_and_once() -> None:
    session, _ = begin(0.2)
    bad = torch.ones(2, device=DEVICE)[torch.tensor([5], device=DEVICE)]
    x = torch.ones(4, device=DEVICE)
    for _ in range(500):
        x = x + 1
    assert djinn.stats()["checkpoints"] >= 1
    with pytest.raises(IndexError):
        x.cpu()
    assert x.cpu().tolist() == [501.0] * 4
    let_die(session)
    assert (x + 1).cpu().tolist() == [502.0] * 4
    with pytest.raises(IndexError):
        bad.cpu()


def test_a_value_that_has_failed_stands_in_nobodys_way() -> None:
    session, _ = begin(0.2)
    bad = torch.ones(2, device=DEVICE)[torch.tensor([5], device=DEVICE)]
    with pytest.raises(IndexError):
        session.synchronize()
    values = [torch.ones(4, device=DEVICE) for _ in range(5)]
    most = 0
    for _ in range(400):
        for value in values:
            value.add_(1)
        most = max(most, unwrapped(session.backend).journal.node_count)
    assert most <= 0.2 / NODE_S + 2 * PIECE
    let_die(session)
    assert [value.cpu().tolist() for value in values] == [[401.0] * 4] * 5
    with pytest.raises(IndexError):
        bad.cpu()


def test_uploads_are_checkpointed_before_there_is_no_room_for_them(caplog: pytest.LogCaptureFixture) -> None:
    session, _ = begin(1000, recovery_bytes=200_000)
    total = torch.zeros(1000, device=DEVICE)
    for step in range(300):
        total.add_(torch.full((1000,), float(step)).to(DEVICE))
        total[0].item()
        assert djinn.stats()["journal_bytes"] <= 200_000
    let_die(session)
    assert total.cpu().tolist() == [sum(range(300))] * 1000
    assert "is not kept" not in caplog.text


def test_checkpoints_that_take_too_much_of_the_time_are_rarer_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "BYTES_PER_S", 16 / 0.05)
    begin(0.2)
    x = torch.ones(4, device=DEVICE)
    for _ in range(1300):
        x = x + 1
    x.cpu()
    # Half a second apart, for each takes a twentieth of one.
    assert djinn.stats()["checkpoints"] in (1, 2)
    [warning] = said(caplog)
    assert re.search(r"recovery_budget_s is 0\.2: a checkpoint takes 0\.0\d+ s, and all of them may take 10% ", warning)


def test_checkpoints_that_there_is_no_room_for_are_said(caplog: pytest.LogCaptureFixture) -> None:
    begin(0.2, recovery_bytes=1000)
    x = torch.ones(1000, device=DEVICE)
    for _ in range(600):
        x = x + 1
    x.sum().item()
    [warning] = said(caplog)
    assert "recovery_bytes allows 1,000" in warning


def test_values_that_cannot_be_fetched_are_said(caplog: pytest.LogCaptureFixture) -> None:
    session, _ = begin(0.2)
    moved, other = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    moved.set_(other)
    for _ in range(600):
        moved.add_(1)
    assert moved.sum().item() == 3 * 601
    [warning] = said(caplog)
    assert "cannot be fetched" in warning
    let_die(session)
    assert other.cpu().tolist() == [601.0] * 3


def test_a_journal_that_has_become_too_long_is_given_up_and_that_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_NODES", 2000)
    session, _ = begin(0.2, recovery_bytes=1000)
    x = torch.ones(1000, device=DEVICE)
    for _ in range(20_000):
        x = x + 1
    assert unwrapped(session.backend).journal.node_count < 10_000
    assert x[0].item() == 20_001
    assert "not kept any longer" in said(caplog)[-1]
    let_die(session)
    with pytest.raises(TransportError, match="not kept"):
        x.cpu()


def test_run_time_is_that_of_programs_and_on_a_device_of_its_own_until_it_is_through(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0

    def work(ns: int) -> int:
        nonlocal now_ns
        now_ns += ns
        return ns

    monkeypatch.setattr(reports, "worked_ns", lambda: now_ns + 1)
    here: Any = SimpleNamespace(device="cpu")
    there: Any = SimpleNamespace(device="cuda:0", settle=lambda: work(500))
    for executor, wanted in ((here, 30), (there, 580)):
        run_time = reports.RunTime(executor, lambda action: action())
        assert run_time.of(lambda: work(1000)) == 1000
        assert run_time.take() == 0
        run_time.is_wanted = True
        assert run_time.take() == 0
        assert run_time.of(lambda: work(10)) == 10
        work(50)
        with pytest.raises(ZeroDivisionError):
            run_time.of(lambda: work(20) // 0)
        assert run_time.take() == wanted
        assert run_time.take() == 0


def test_what_an_answer_that_nobody_looked_at_told_is_added() -> None:
    assert after(Result(run_ns=5), Result(run_ns=7)).run_ns == 12


def test_a_server_tells_how_long_programs_ran_only_if_it_is_asked() -> None:
    session = djinn.init(recovery="replay", device="cpu")
    (torch.ones(300, 300, device=DEVICE) @ torch.ones(300, 300, device=DEVICE)).cpu()
    assert unwrapped(session.backend)._meters[0].run_ns > 0
    assert unwrapped(session.backend).journal.replay_s > 0
    djinn.init(device="cpu")
    told: list[Result] = []
    connection: Any = unwrapped(djinn.ensure_initialized().backend).connection
    request = connection.request

    def watched(*args: Any) -> Any:
        answer = request(*args)
        told.append(answer[0])
        return answer

    connection.request = watched
    (torch.ones(3, device=DEVICE) + 1).cpu()
    assert [result.run_ns for result in told] == [0]
