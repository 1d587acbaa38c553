"""What is not wanted any more is not computed: what a client has cancelled, or has left behind."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.processes.long_work import COUNTER, LONG, PRODUCT, SHORT, STEPS_OF_LONG, Working
from support.servers.serving import Serving

from djinn.wire.messages import Batch, Poisoned

LEASE_S = 1.0


@pytest.fixture
def working(server: Any) -> Iterator[Working]:
    made = Working(server.address)
    yield made
    made.close()


def expect_cancelled(working: Working) -> None:
    result, _ = working.connection.request(Batch(fetch=(PRODUCT,)), ())
    assert isinstance(result.items[0], Poisoned)
    assert {failure.kind for failure in result.failures} == {"OperationCancelledError"}


def expect_alive(working: Working) -> None:
    before = working.counted()
    working.submit(SHORT)
    assert working.counted() == before + 1
    result, data = working.connection.request(Batch(fetch=(PRODUCT, COUNTER)), ())
    assert not result.failures
    assert len(data) == 2


def test_programs_that_are_cancelled_do_not_run_and_the_session_lives_on(working: Working) -> None:
    for _ in range(400):
        working.submit(SHORT)
    working.cancel()
    expect_cancelled(working)
    assert working.counted() < 200
    expect_alive(working)


def test_a_program_that_is_cancelled_ends_between_its_steps(working: Working) -> None:
    """At first it is interpreted, later it is compiled."""
    for _ in range(3):
        before = working.counted()
        working.submit(LONG)
        time.sleep(0.3)
        working.cancel()
        expect_cancelled(working)
        assert working.counted() - before < STEPS_OF_LONG / 2
    expect_alive(working)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that keeps sessions for `LEASE_S`, and says what it has run."""
    with Serving(tmp_path_factory.mktemp("counting") / "log", "--lease-s", str(LEASE_S), "--metrics-port", "0"
                 ) as running:
        yield running


def counted(server: Serving, series: str) -> int:
    """Return what the server counts, one sample's value."""
    page = server.log.read_text().partition("metrics on ")[2].split()[0].removesuffix("/metrics")
    told = urllib.request.urlopen(f"{page}/metrics").read().decode()
    return sum(int(float(line.split()[-1])) for line in told.splitlines() if line.startswith(f"{series}{{"))


@pytest.mark.parametrize("says_goodbye", [True, False], ids=["goodbye", "killed"])
def test_what_a_client_has_left_behind_is_dropped(counting: Serving, says_goodbye: bool) -> None:
    pytest.importorskip("prometheus_client")
    other, leaving = Working(counting.address, side=64), Working(counting.address)
    leaving.submit(SHORT)
    assert leaving.counted() == 1
    ran, dropped = (counted(counting, f"djinn_{name}") for name in (
        "queue_wait_seconds_count", "programs_dropped_total"))
    runs = 10
    for _ in range(runs):
        leaving.submit(LONG)
    if says_goodbye:
        leaving.close()
    else:
        leaving.vanish()
    deadline = time.monotonic() + 60
    while f"session {leaving.name} ends" not in counting.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    other.submit(SHORT)
    assert other.counted() == 1
    time.sleep(1)  # until the worker has told
    ran = counted(counting, "djinn_queue_wait_seconds_count") - ran - 1
    assert ran < runs / 2, f"{ran} of {runs} programs were run for nobody"
    assert counted(counting, "djinn_programs_dropped_total") >= dropped
    other.close()
