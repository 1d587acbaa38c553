"""Where several servers are named, one that is killed is replaced by another, without any setting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.servers.crashes import DEVICE, free_port, trained
from support.servers.fleet import kill

import djinn
from djinn.errors import OutOfMemoryError, TransportError
from djinn_plugins.replay import returning

FAILOVER_S = 0.3
OTHER = "remote_accelerator:1"


@pytest.fixture
def servers(start_server: Callable[..., Any]) -> Iterator[list[Any]]:
    yield [start_server() for _ in range(2)]
    djinn.shutdown()


@pytest.fixture
def limited(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(returning, "EVERY_S", 0.0)
    yield [start_server("--memory-mib", "16", "--port", str(free_port())) for _ in range(2)]
    djinn.shutdown()


def busiest(servers: list[Any], session: Any) -> Any:
    """Return the server with the most work. An earlier session may still count as load on either."""
    address = max(session.backend.executors, key=lambda executor: executor.nodes_sent).address
    return next(server for server in servers if server.address == address)


def start(servers: list[Any], **settings: Any) -> Any:
    return djinn.init(servers=[server.address for server in servers], failover_timeout_s=FAILOVER_S, **settings)


@pytest.mark.parametrize("placement", ["explicit", "automatic"])
def test_training_gives_the_same_bits_though_one_of_two_servers_is_killed(servers: list[Any], placement: str) -> None:
    start(servers, placement=placement)
    wanted = trained(8)
    session = start(servers, placement=placement)
    got = trained(8, lambda step: kill(busiest(servers, session)) if step == 3 else None)
    assert djinn.stats()["recoveries"] == 1
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def test_a_server_that_waits_for_a_dead_one_may_notice_first(
    servers: list[Any], monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = start(servers)
    there, here = torch.arange(4.0, device=DEVICE), torch.ones(4, device=OTHER)
    assert there.sum().item() + here.sum().item() == 10
    kill(servers[0])
    # The system takes what is sent until the other end answers that nobody is there.
    monkeypatch.setattr(session.backend.executors[0], "submit", lambda: None)
    assert (here + (there * 2).to(OTHER)).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert djinn.stats()["recoveries"] == 1


def test_a_server_that_is_killed_while_a_value_is_awaited_is_no_exception(servers: list[Any]) -> None:
    start(servers)
    x = torch.eye(700, device=DEVICE)
    for _ in range(200):
        x = x @ x
    threading.Timer(0.05, kill, servers[:1]).start()
    assert torch.equal(x.cpu(), torch.eye(700))
    began = time.monotonic()
    assert torch.equal((x + 1).cpu(), torch.eye(700) + 1)
    assert time.monotonic() - began < 20


def test_a_session_begins_though_one_of_two_servers_is_gone(
    servers: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    kill(servers[1])
    start(servers)
    one, other = torch.ones(3, device=DEVICE), torch.ones(3, device="remote_accelerator:1")
    assert (one + other.to(DEVICE)).tolist() == [2, 2, 2]
    assert djinn.stats()["local_fallbacks"] == 0
    assert f"{servers[1].address} does not answer; {servers[0].address} does its work as well" in caplog.text


def test_a_server_that_is_back_takes_part_in_new_work(limited: list[Any], start_server: Callable[..., Any]) -> None:
    session = start(limited, placement="automatic")
    session.seed(3)
    mine = torch.Generator().manual_seed(3)
    large = torch.arange(5.0 * 2**19)  # 10 MiB: a server has memory for one
    first, drawn = large.to(DEVICE), torch.rand(7, device=DEVICE)
    view = first[:9]
    assert torch.equal(drawn.cpu(), torch.rand(7, generator=mine))
    kill(limited[0])
    assert torch.equal(view.cpu(), large[:9])
    assert [executor.address for executor in session.backend.executors] == [limited[1].address]
    with pytest.raises(OutOfMemoryError):
        large.to(DEVICE)
    start_server("--memory-mib", "16", "--port", limited[0].address.rpartition(":")[2])
    while not djinn.stats()["servers_returned"]:
        assert torch.equal((view + 1).cpu(), large[:9] + 1)
    addresses = [executor.address for executor in session.backend.executors]
    assert addresses == [limited[1].address, limited[0].address]
    second = (large + 1).to(DEVICE)
    view.add_(second[:9])
    for held, wanted in ((second[-9:], large[-9:] + 1), (first[:9], 2 * large[:9] + 1)):
        drawn = torch.rand(9, device=DEVICE)
        assert torch.equal((held * drawn).cpu(), wanted * torch.rand(9, generator=mine))
    assert all(executor.nodes_sent for executor in session.backend.executors)
    assert djinn.stats()["recoveries"] == 1


def test_without_recovery_a_server_that_is_gone_is_an_error(servers: list[Any]) -> None:
    start(servers, recovery="none")
    x = torch.ones(3, device=DEVICE) + 1
    x.cpu()
    kill(servers[0])
    with pytest.raises(TransportError):
        (x + 1).cpu()
    with pytest.raises(TransportError):
        start(servers, recovery="none")
    kill(servers[1])
    with pytest.raises(TransportError):
        start(servers)
