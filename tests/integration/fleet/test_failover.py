"""Where several servers are named, one that is killed is replaced by another, without any setting."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.servers.crashes import DEVICE, trained
from support.servers.serving import children_of

import djinn
from djinn.errors import TransportError

FAILOVER_S = 0.3


@pytest.fixture
def servers(start_server: Callable[..., Any]) -> Iterator[list[Any]]:
    yield [start_server() for _ in range(2)]
    djinn.shutdown()


def kill(server: Any) -> None:
    """Kill a server with all its processes, so that nothing comes back."""
    gone = [server.process.pid, *children_of(server.process.pid), *server.workers]
    for process in gone:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def start(servers: list[Any], **settings: Any) -> Any:
    return djinn.init(servers=[server.address for server in servers], failover_timeout_s=FAILOVER_S, **settings)


@pytest.mark.parametrize("placement", ["explicit", "automatic"])
def test_training_gives_the_same_bits_though_one_of_two_servers_is_killed(servers: list[Any], placement: str) -> None:
    start(servers, placement=placement)
    wanted = trained(8)
    start(servers, placement=placement)
    got = trained(8, lambda step: kill(servers[0]) if step == 3 else None)
    assert djinn.stats()["recoveries"] == 1
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


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
