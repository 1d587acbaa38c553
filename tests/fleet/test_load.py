"""Work goes to the server that has the least to do now, whatever it had to do when the session began."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.clients.tenants import Saturating, Worked
from support.servers.fleet import fleet_of

import djinn
from djinn.session.session import Session
from djinn_plugins.fleet import loads

DEVICE = "remote_accelerator:0"
PRODUCTS = 2000
PATIENCE_S = 30.0


@pytest.fixture
def two(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, list[Any]]]:
    monkeypatch.setattr(loads, "REFRESH_S", 0.05)
    servers = [start_server() for _ in range(2)]
    session = djinn.init(servers=[server.address for server in servers], placement="automatic", recovery="none")
    yield session, servers
    djinn.shutdown()


def heard(session: Session) -> list[float]:
    return [device.load for device in djinn.schedule(graph()).device_infos]


def graph() -> Any:
    with djinn.capture() as captured:
        torch.ones(3)
    return captured


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def where_new_work_goes(session: Session, size: int) -> int | None:
    made = torch.full((size, size), 0.5, device=DEVICE) @ torch.full((size, size), 2.0, device=DEVICE)
    djinn.flush()
    return fleet_of(session).where.home_of(made._value.slot.number)


def test_work_follows_the_load_of_servers(two: tuple[Session, list[Any]]) -> None:
    session, servers = two
    assert heard(session) == [0, 0]
    first = where_new_work_goes(session, 300)
    assert first is not None
    with Saturating(Worked(servers[first].address, "", PRODUCTS)):
        wait_until(lambda: heard(session)[first] > 0.5)
        assert heard(session)[1 - first] < 0.1
        assert where_new_work_goes(session, 300) == 1 - first
    # What others leave is used again.
    wait_until(lambda: heard(session)[first] < 0.1)
    assert where_new_work_goes(session, 300) == first


def test_uploads_begin_on_the_server_with_the_least_to_do(two: tuple[Session, list[Any]]) -> None:
    session, servers = two
    with Saturating(Worked(servers[0].address, "", PRODUCTS)):
        wait_until(lambda: heard(session)[0] > 0.5)
        there = torch.ones(3).to(DEVICE)
        djinn.flush()
        assert fleet_of(session).where.home_of(there._value.slot.number) == 1


def test_a_server_that_was_busy_gets_work_again_and_is_asked_seldom(
    two: tuple[Session, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "REVISIT_S", 0.2)
    session, servers = two
    numbers = itertools.count(0.5)

    def done_by() -> int | None:
        """Compute something new, wait for it, and say where that was done."""
        made = torch.full((300, 300), next(numbers), device=DEVICE) @ torch.ones(300, 300, device=DEVICE)
        made.sum().item()
        return fleet_of(session).where.home_of(made._value.slot.number)

    first = done_by()
    assert first is not None
    with Saturating(Worked(servers[first].address, "", PRODUCTS)):
        wait_until(lambda: done_by() == 1 - first)
        # Nothing is fetched from it any more.
        djinn.reset_stats()
        began_s = time.monotonic()
        for _ in range(50):
            assert done_by() == 1 - first
        asked = djinn.stats()["round_trips"] - djinn.stats()["materializations"]
        assert asked <= 1 + (time.monotonic() - began_s) / 0.2
    wait_until(lambda: done_by() == first)


def test_the_load_comes_with_values_that_are_fetched_and_costs_no_trip(two: tuple[Session, list[Any]]) -> None:
    session, servers = two
    x = torch.arange(3.0).to(DEVICE)
    (x + 1).cpu()
    home = fleet_of(session).where.home_of(x._value.slot.number)
    assert home is not None
    with Saturating(Worked(servers[home].address, "", PRODUCTS)):
        djinn.reset_stats()

        def is_known() -> bool:
            (x + 1).cpu()
            return fleet_of(session)._loads.of(home) > 0.5

        wait_until(is_known)
    assert djinn.stats()["round_trips"] == djinn.stats()["materializations"]


def test_a_session_with_one_server_plans_with_its_load(start_server: Callable[..., Any]) -> None:
    server = start_server()
    djinn.init(server.address)
    with ExitStack() as stack:
        assert heard(djinn.ensure_initialized()) == [0]
        for _ in range(50):
            torch.ones(300, 300, device=DEVICE).sum().item()
        # Its own work is no load.
        assert heard(djinn.ensure_initialized()) == [0]
        stack.enter_context(Saturating(Worked(server.address, "", PRODUCTS)))
        wait_until(lambda: heard(djinn.ensure_initialized())[0] > 0.5)
    djinn.shutdown()
