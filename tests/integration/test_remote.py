"""The same over TCP: another process holds the data, and may die."""

from __future__ import annotations

import copy
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.processes.warm import WarmPython, clean_environment
from torch import nn

import djinn

DEVICE = torch.device("remote_accelerator:0")


@pytest.fixture
def session(server):
    djinn.init(server=server.address)
    yield server
    djinn.init()


def test_it_runs_there(session) -> None:
    state = djinn.get_runtime_state()
    assert state.address == session.address
    x = torch.randn(64, 64, device=DEVICE)
    djinn.reset_stats()
    assert (x @ x.t()).diagonal().sum().item() == pytest.approx((x * x).sum().item(), rel=1e-4)
    stats = djinn.stats()
    assert stats["round_trips"] == 2
    assert 0 < stats["bytes_sent"] < 4000
    assert 0 < stats["bytes_received"] < 1000


def test_generation_equals_eager_over_tcp(session) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_embd=96, n_head=4)).eval()
    remote = copy.deepcopy(model).to(DEVICE)
    prompt = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(remote.generate(prompt.to(DEVICE), **options).cpu(), model.generate(prompt, **options))
    remote.generate(prompt.to(DEVICE), **options).cpu()
    djinn.reset_stats()
    remote.generate(prompt.to(DEVICE), **options).cpu()
    stats = djinn.stats()
    assert stats["programs_sent"] == 0
    assert stats["round_trips"] <= 1.1 * 24 + 3


def test_known_programs_travel_as_an_id(session) -> None:
    x = torch.ones(8, device=DEVICE)

    def step(factor: float) -> int:
        djinn.reset_stats()
        assert (x * factor).add(1).relu().sum().item() == pytest.approx(8 * (factor + 1))
        return djinn.stats()["bytes_sent"]

    first = step(1.0)
    second, third = step(2.0), step(3.0)
    assert third < second < first
    # A number that continues a row takes no room; others do.
    assert step(4.0) <= step(9.0) == step(4.5) == step(7.0)
    assert step(6.0) < 0.5 * first
    assert djinn.stats()["programs_sent"] == 0


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this platform cannot kill a process outright")
def test_a_killed_server_is_reported_and_survived(start_server, server) -> None:
    doomed = start_server()
    djinn.init(server=doomed.address)
    x = torch.ones(3, device=DEVICE)
    assert x.sum().item() == 3
    doomed.kill()
    begin = time.monotonic()
    with pytest.raises(djinn.TransportError, match=doomed.address.removeprefix("tcp://")):
        (x + 1).sum().item()
    assert time.monotonic() - begin < 5
    with pytest.raises(djinn.TransportError):
        x.cpu()
    for _ in range(500):
        x = x + 1
    with pytest.raises(djinn.TransportError):
        x.cpu()
    djinn.init(server=server.address)
    with pytest.raises(djinn.SessionClosedError):
        x.cpu()
    assert (torch.ones(3, device=DEVICE) * 2).tolist() == [2.0, 2.0, 2.0]
    djinn.init()


def test_a_wrong_address_is_a_clear_error() -> None:
    djinn.init()
    with pytest.raises(djinn.TransportError, match="127.0.0.1:9"):
        djinn.init(server="tcp://127.0.0.1:9", connect_timeout_s=3)
    assert not djinn.is_initialized()
    assert torch.ones(2, device=DEVICE).sum().item() == 2
    with pytest.raises(djinn.DjinnError, match="carrier"):
        djinn.init(server="carrier://pigeon")


def _work(seed: int, rounds: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 16, generator=generator)
    remote = weight.to(DEVICE)
    local = weight.clone()
    for index in range(rounds):
        remote, local = (remote @ remote).tanh(), (local @ local).tanh()
        remote[index % 16] += index
        local[index % 16] += index
        if index % 7 == 0:
            torch.testing.assert_close(remote.sum().cpu(), local.sum())
    torch.testing.assert_close(remote.cpu(), local)
    return float(local.sum())


def test_threads_share_a_session(session) -> None:
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            _work(seed, 60)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_processes_share_a_server(session, tmp_path: Path) -> None:
    script = (
        "import sys, torch, djinn\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_remote import _work\n"
        "torch.manual_seed(int(sys.argv[1]))\n"
        "expected = torch.randn(4)\n"
        "torch.manual_seed(int(sys.argv[1]))\n"
        "assert torch.equal(torch.randn(4, device='remote_accelerator').cpu(), expected)\n"
        "_work(int(sys.argv[1]), 60)\n"
    )
    logs = [tmp_path / "11", tmp_path / "12"]
    with ExitStack() as running:
        children = [running.enter_context(WarmPython(
            script, [log.name], environment=clean_environment(DJINN_SERVER=session.address), log=log, prints=False,
            has_djinn=True)) for log in logs]
        _work(13, 60)
        assert [child.wait(timeout=120) for child in children] == [0, 0], [log.read_text() for log in logs]


def test_handles_are_freed_over_tcp(session) -> None:
    model = nn.Linear(8, 8).to(DEVICE)
    torch.ones(1, device=DEVICE).item()
    djinn.synchronize()
    before = djinn.stats()["live_handles"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(2, 8, device=DEVICE)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    del optimizer
    djinn.synchronize()
    assert djinn.stats()["live_handles"] == before
