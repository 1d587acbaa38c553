"""Servers are killed, and the program goes on as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.gpt2 import PROMPT, gpt2
from support.servers.crashes import DEVICE, Supervised, killed, random_program, same, trained

import djinn
from djinn.errors import RefusedError, StateLostError, TransportError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    with Supervised(tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    yield
    djinn.shutdown()


def start(*servers: Supervised, **settings: Any) -> Any:
    where = {"server": servers[0].address} if len(servers) == 1 else {"servers": [one.address for one in servers]}
    return djinn.init(recovery="replay", log_level="ERROR", **where, **settings)


def tokens(count: int, *, do_sample: bool, after: Callable[[int], Any] = lambda count: None) -> torch.Tensor:
    model = gpt2(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=256).to(DEVICE)
    counts = itertools.count(1)

    def processed(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        after(next(counts))
        return scores

    torch.manual_seed(5)
    with torch.no_grad():
        return model.generate((PROMPT % 500).to(DEVICE), max_new_tokens=count, do_sample=do_sample, pad_token_id=0,
                              eos_token_id=None, logits_processor=[processed]).cpu()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_what_is_generated_is_the_same_though_the_server_is_killed(server: Supervised, do_sample: bool) -> None:
    start(server)
    wanted = tokens(40, do_sample=do_sample)
    start(server)
    with killed(server, 2, seed=int(do_sample), longest_s=0.2) as kills:
        got = tokens(40, do_sample=do_sample)
        while len(kills) < 2:
            assert torch.equal(tokens(40, do_sample=do_sample), wanted)
    assert torch.equal(got, wanted)
    assert djinn.stats()["recoveries"] >= 1


def test_training_gives_the_same_bits_though_the_server_is_killed(server: Supervised) -> None:
    start(server)
    wanted = trained(8)
    start(server)
    got = trained(8, lambda step: server.kill() if step in (2, 6) else None)
    assert djinn.stats()["recoveries"] == 2
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


@pytest.mark.parametrize("asks_every", [10, 0])
def test_what_is_done_again_does_not_grow_with_the_age_of_a_run(server: Supervised, asks_every: int) -> None:
    start(server)
    wanted = trained(300, asks_every=asks_every)
    executed = djinn.stats()["nodes_executed"]
    start(server, recovery_budget_s=0.02)
    got = trained(300, lambda step: server.kill() if step == 290 else None, asks_every=asks_every)
    counted = djinn.stats()
    assert counted["recoveries"] == 1
    assert counted["checkpoints"] >= 2
    # Without any bound, almost all of them.
    assert counted["nodes_replayed"] < executed / 2
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def test_what_is_generated_for_long_is_not_all_done_again(server: Supervised) -> None:
    start(server)
    wanted = tokens(150, do_sample=True)
    start(server, recovery_budget_s=0.05)
    got = tokens(150, do_sample=True, after=lambda count: server.kill() if count == 120 else None)
    counted = djinn.stats()
    assert torch.equal(got, wanted)
    assert counted["recoveries"] == 1
    assert counted["nodes_replayed"] < counted["nodes_executed"] / 2


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_give_the_same_though_the_server_is_killed(server: Supervised, seed: int) -> None:
    wanted = random_program(seed, "cpu")
    start(server)
    got = random_program(seed, DEVICE, server.kill)
    assert all(same(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_a_server_that_is_killed_in_a_fetch_is_no_exception(server: Supervised) -> None:
    start(server)
    x = torch.eye(700, device=DEVICE)
    for _ in range(100):
        x = x @ x
    threading.Timer(0.05, server.kill).start()
    assert torch.equal(x.cpu(), torch.eye(700))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which processes there are")
def test_a_worker_that_is_killed_is_no_exception(start_server: Any) -> None:
    gateway = start_server()
    djinn.init(server=gateway.address, recovery="replay", log_level="ERROR")
    torch.manual_seed(4)
    x = torch.rand(3, device=DEVICE)
    wanted = x.cpu()
    for count in (1, 2):
        [worker] = gateway.workers
        os.kill(worker, signal.SIGKILL)
        x = x + torch.ones(3, device=DEVICE)
        assert torch.equal(x.cpu(), wanted + count)
        assert worker not in gateway.workers
        assert djinn.stats()["recoveries"] == count


def test_recovery_takes_little_more_than_the_server_needs(server: Supervised) -> None:
    start(server)
    x = torch.ones(3, device=DEVICE) + 1
    x.cpu()
    server.kill()
    began = time.monotonic()
    assert x.cpu().tolist() == [2, 2, 2]
    assert time.monotonic() - began < 5


def test_what_was_changed_here_since_it_was_sent_is_lost_and_nothing_else_is(server: Supervised) -> None:
    start(server)
    here, other = torch.zeros(600, 600), torch.ones(2)
    lost, kept = here.to(DEVICE), other.to(DEVICE)
    derived = lost + 1
    kept_too = kept + torch.rand(2, device=DEVICE)
    wanted = kept_too.cpu()
    here.add_(1)
    server.kill()
    assert torch.equal(kept_too.cpu(), wanted)
    for value in (lost, derived, derived[0] * 2):
        with pytest.raises(StateLostError, match=r"changed since"):
            value.cpu()
    with pytest.raises(StateLostError, match=r"\(600, 600\) and torch.float32 \(value \d+\)"):
        derived.cpu()
    kept.add_(derived.sum())
    with pytest.raises(StateLostError):
        kept.cpu()
    assert torch.equal((kept_too + 1).cpu(), wanted + 1)
    del lost, derived, value, kept, kept_too
    assert djinn.ensure_initialized().synchronize() is None
    assert djinn.stats()["live_handles"] == 0


def test_what_numpy_changes_is_noticed(server: Supervised) -> None:
    start(server)
    here = torch.zeros(600, 600)
    lost = here.to(DEVICE)
    lost.sum().item()
    here.numpy()[300, 300] = 1
    server.kill()
    with pytest.raises(StateLostError, match="changed since"):
        lost.cpu()


def test_what_there_was_no_room_for_is_lost(server: Supervised) -> None:
    start(server, recovery_bytes=1000)
    small, large = torch.ones(5).to(DEVICE), torch.ones(1000).to(DEVICE)
    large.sum().item()
    server.kill()
    assert small.cpu().tolist() == [1] * 5
    with pytest.raises(StateLostError, match=r"recovery_bytes allows 1,000"):
        large.cpu()


def test_a_failure_is_reported_once_and_stays(server: Supervised) -> None:
    start(server)
    bad = torch.ones(2, device=DEVICE)[torch.tensor([5], device=DEVICE)]
    good = torch.ones(2, device=DEVICE)
    with pytest.raises(IndexError):
        djinn.ensure_initialized().synchronize()
    server.kill()
    assert good.cpu().tolist() == [1, 1]
    with pytest.raises(IndexError):
        bad.cpu()


def test_a_failure_that_was_not_reported_yet_is_reported_by_the_next_server(server: Supervised) -> None:
    start(server)
    bad = torch.linalg.inv(torch.zeros(2, 2, device=DEVICE))
    djinn.flush()
    server.kill()
    with pytest.raises(torch.linalg.LinAlgError):
        torch.ones(2, device=DEVICE).cpu()
    del bad


def test_work_that_kills_every_server_ends_in_an_error_that_says_so(server: Supervised) -> None:
    session = start(server)
    x = torch.eye(1000, device=DEVICE)
    for _ in range(300):
        x = x @ x
    with killed(server, 10, seed=0, longest_s=0.1):
        with pytest.raises(TransportError, match="3 times in a row a server died of the same work"):
            x.cpu()
        began = time.monotonic()
        with pytest.raises(TransportError, match="3 times in a row"):
            (x + 1).cpu()
        assert time.monotonic() - began < 1
    assert session.stats()["recoveries"] <= 3


def test_without_a_server_it_goes_on_here_if_that_is_allowed(tmp_path: Path) -> None:
    with Supervised(tmp_path / "log") as mortal:
        start(mortal, local_fallback=True, recovery_timeout_s=0.5)
        torch.manual_seed(4)
        x = torch.randn(3, device=DEVICE)
        wanted = x.cpu()
    assert torch.equal(x.cpu(), wanted)
    assert djinn.stats()["local_fallbacks"] == 1
    assert djinn.get_runtime_state().address == "local://"


def test_local_fallback_alone_is_enough_in_the_middle_of_a_session(tmp_path: Path) -> None:
    with Supervised(tmp_path / "log") as mortal:
        djinn.init(mortal.address, local_fallback=True, recovery_timeout_s=0.5, log_level="ERROR")
        x = torch.randn(3, device=DEVICE)
        wanted = x.cpu()
    assert torch.equal((x + 1).cpu(), wanted + 1)
    assert djinn.stats()["local_fallbacks"] == 1


def test_local_fallback_alone_is_enough_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = "tcp://127.0.0.1:1"
    with pytest.raises(TransportError):
        djinn.init(nowhere)
    with pytest.raises(TransportError):
        djinn.init(nowhere, local_fallback=True, recovery="none")
    djinn.init(nowhere, local_fallback=True)
    assert (torch.ones(3, device=DEVICE) + 1).tolist() == [2, 2, 2]
    assert djinn.stats()["local_fallbacks"] == 1
    assert djinn.get_runtime_state().address == "local://"
    assert 'djinn_execution_strategy_used{strategy="local"} 0' not in djinn.metrics()
    assert f"{nowhere} cannot be reached: operations run in this process" in caplog.text


def test_a_refusal_is_no_reason_to_go_on_here(start_server: Any) -> None:
    server = start_server(DJINN_TOKEN="secret")
    with pytest.raises(RefusedError):
        djinn.init(server.address, token="wrong", local_fallback=True)


def test_without_a_server_it_says_so_otherwise(tmp_path: Path) -> None:
    with Supervised(tmp_path / "log") as mortal:
        start(mortal, recovery_timeout_s=0.5)
        x = torch.ones(3, device=DEVICE) + 1
        x.cpu()
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"No server came back within 0.5 s"):
        x.cpu()
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("placement", ["explicit", "automatic"])
def test_another_server_of_the_session_does_the_work_of_one_that_is_gone(
    server: Supervised, tmp_path: Path, placement: str
) -> None:
    with Supervised(tmp_path / "log") as mortal:
        start(mortal, server, placement=placement, recovery_timeout_s=1.0)
        second = "remote_accelerator:1" if placement == "explicit" else DEVICE
        torch.manual_seed(4)
        one, other = torch.rand(3, device=DEVICE), torch.rand(3, device=second)
        both = one + other.to(DEVICE)
        wanted = [value.cpu() for value in (one, other, both)]
    assert all(torch.equal(value.cpu(), should) for value, should in zip((one, other, both), wanted, strict=True))
    assert djinn.stats()["recoveries"] == 1
