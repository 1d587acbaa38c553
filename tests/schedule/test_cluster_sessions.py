"""The simulated cluster of sessions against formulae, and against the rules that hold whatever fails."""

from __future__ import annotations

import statistics

import pytest
from support.planning.cluster_sessions import ClusterRun, Failure, Workload, simulate_sessions

from djinn_plugins.cluster.directory.choosing import STALE_S
from djinn_plugins.schedule.costs import waiting_s

SINGLE = Workload(load=0.6, service_s=0.1, pause_s=0.0, requests=1.0)
"""Sessions of one request, which come at random: one server is a queue M/M/1."""


def waits(run: ClusterRun, begin_s: float = 50.0) -> list[float]:
    return [answer.waited_s for answer in run.answers if answer.asked_s > begin_s]


def test_one_server_is_the_queue_of_the_books() -> None:
    means = [statistics.fmean(waits(simulate_sessions(1, SINGLE, 1000.0, seed=seed))) for seed in range(12)]
    error_s = statistics.stdev(means) / len(means) ** 0.5
    assert statistics.fmean(means) == pytest.approx(waiting_s(0.1, 0.6), abs=4 * error_s)
    assert error_s < waiting_s(0.1, 0.6) / 10, "close enough to tell the formula from others"


def test_a_directory_spreads_sessions() -> None:
    """Chosen at random, the fullest of so many servers would have more than twice as many sessions as the mean."""
    assert simulate_sessions(50, Workload(), 60.0).most < 1.7


@pytest.mark.parametrize("unnoticed_s", [0.0, 8.0])
def test_every_request_is_answered_once_though_servers_fail(unnoticed_s: float) -> None:
    work = Workload(load=0.5)
    failures = tuple(Failure(at_s, 0.3, back_s=20.0, unnoticed_s=unnoticed_s) for at_s in (40.0, 70.0))
    run = simulate_sessions(10, work, 200.0, failures=failures, seed=3)
    quiet = simulate_sessions(10, work, 200.0, seed=3)
    assert len(run.interrupted_s) > 10
    assert not quiet.interrupted_s
    # Sessions ask one request at a time, so what is not answered yet is less than one a session.
    waiting = run.asked - len(run.answers)
    assert 0 <= waiting < 60
    assert len({(answer.asked_s, answer.waited_s) for answer in run.answers}) == len(run.answers)
    assert min(run.interrupted_s) >= unnoticed_s


def test_a_server_that_vanishes_is_not_named_for_longer_than_its_reports_count() -> None:
    lost = Failure(50.0, 0.5, back_s=1e9, unnoticed_s=0.5)
    run = simulate_sessions(4, Workload(load=0.3), 120.0, failures=(lost,))
    assert max(run.interrupted_s) < STALE_S + 10
    assert run.most < 2


def test_a_seed_gives_the_same_run() -> None:
    runs = [simulate_sessions(5, Workload(), 60.0, failures=(Failure(30.0, 0.2, 5.0),), seed=seed)
            for seed in (1, 1, 2)]
    assert runs[0].answers == runs[1].answers != runs[2].answers
