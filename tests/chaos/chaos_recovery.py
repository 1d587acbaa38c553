"""What `nox -s chaos` does to recovery: many kills at random moments, long programs."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.models.gpt2 import PROMPT, gpt2
from support.servers.crashes import DEVICE, Supervised, killed, random_program, same, trained

import djinn
from djinn.kinds.backend_wrapper import unwrapped
from djinn.session.session import Session
from djinn_plugins.replay.settings import RecoverySettings

STEPS = int(os.environ.get("DJINN_CHAOS_STEPS", "10000"))
BUDGET_S = RecoverySettings().recovery_budget_s
KILLS = int(os.environ.get("DJINN_CHAOS_KILLS", "1000"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    with Supervised(tmp_path_factory.mktemp("server") / "log") as running:
        yield running
    djinn.shutdown()


def start(server: Supervised) -> Session:
    return djinn.init(server=server.address, recovery="replay", log_level="ERROR")


def tokens(count: int, *, do_sample: bool) -> torch.Tensor:
    model = gpt2(n_layer=4, n_embd=128, n_head=4, vocab_size=500, n_positions=256).to(DEVICE)
    torch.manual_seed(5)
    with torch.no_grad():
        return model.generate((PROMPT % 500).to(DEVICE), max_new_tokens=count, do_sample=do_sample, pad_token_id=0,
                              eos_token_id=None).cpu()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_200_tokens_and_five_kills(
    server: Supervised, do_sample: bool, tell: Callable[[str, str], None],
) -> None:
    start(server)
    began = time.monotonic()
    wanted = tokens(200, do_sample=do_sample)
    took_s = time.monotonic() - began
    start(server)
    began = time.monotonic()
    with killed(server, 5, seed=7, longest_s=took_s / 6) as kills:
        got = tokens(200, do_sample=do_sample)
        disturbed_s = time.monotonic() - began
        assert len(kills) == 5
    assert torch.equal(got, wanted)
    counted = djinn.stats()
    assert counted["recoveries"] == 5
    assert disturbed_s < 6 * took_s + 5 * 5
    tell(f"`generate` of 200 tokens, {'sampled' if do_sample else 'greedy'}; the worker is killed with `kill -9` five "
         "times", f"the same tokens, no exception, in {disturbed_s:.2f} s instead of {took_s:.2f} s; "
         f"{counted['nodes_replayed']} operations ran again")


def test_100_steps_and_five_kills(server: Supervised, tell: Callable[[str, str], None]) -> None:
    start(server)
    began = time.monotonic()
    wanted = trained(100)
    took_s = time.monotonic() - began
    start(server)
    dies = set(random.Random(3).sample(range(100), 5))
    began = time.monotonic()
    got = trained(100, lambda step: server.kill() if step in dies else None)
    disturbed_s = time.monotonic() - began
    assert djinn.stats()["recoveries"] == 5
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
    tell("100 training steps with AdamW; the worker is killed with `kill -9` five times",
         f"the same parameters bit for bit, in {disturbed_s:.2f} s instead of {took_s:.2f} s")


@pytest.fixture(scope="module")
def undisturbed(server: Supervised) -> tuple[dict[str, torch.Tensor], float, int]:
    """What training gives, how long it takes, and how many operations."""
    start(server)
    began = time.monotonic()
    wanted = trained(STEPS + 5, asks_every=20)
    return wanted, time.monotonic() - began, djinn.stats()["nodes_executed"]


@pytest.mark.parametrize("asks_every", [20, 0], ids=["loss each 20 steps", "loss never"])
def test_10000_steps_and_a_kill(
    server: Supervised, undisturbed: tuple[dict[str, torch.Tensor], float, int], asks_every: int,
    tell: Callable[[str, str], None],
) -> None:
    wanted, took_s, operations = undisturbed
    session = start(server)
    again_s: list[float] = []

    def disturb(step: int) -> None:
        again_s.append(unwrapped(session.backend).journal.replay_s)
        if step == STEPS - 1:
            server.kill()

    began = time.monotonic()
    got = trained(STEPS + 5, disturb, asks_every=asks_every)
    disturbed_s = time.monotonic() - began
    counted = djinn.stats()
    assert counted["recoveries"] == 1
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []
    assert max(again_s) < 1.25 * BUDGET_S
    assert counted["replay_ms"] < 1000 * BUDGET_S
    tell(f"{STEPS:,} training steps with AdamW, {operations:,} operations; the loss is asked for "
         f"{f'each {asks_every} steps' if asks_every else 'never'}; then the worker is killed with `kill -9`",
         f"the same parameters bit for bit; {counted['nodes_replayed']:,} operations ran again, "
         f"{counted['replay_ms'] / 1000:.2f} s of work; at no time would it have been more than {max(again_s):.2f} s; "
         f"{counted['checkpoints']} checkpoints, {counted['checkpoint_bytes']:,} bytes in all, took "
         f"{counted['checkpoint_ms'] / 1000:.2f} s of {disturbed_s:.1f} s; without deaths {took_s:.1f} s")


def test_many_kills_at_random_moments_of_random_programs(
    server: Supervised, tell: Callable[[str, str], None],
) -> None:
    start(server)
    seed = recoveries = 0
    kills_before, began = server.starts, time.monotonic()
    choose = random.Random(11)
    while server.starts - kills_before < KILLS:
        seed += 1
        wanted = random_program(seed, "cpu")
        start(server)
        with killed(server, 3, seed, longest_s=choose.choice([0.001, 0.01, 0.03])):
            for _ in range(3):
                got = random_program(seed, DEVICE)
                assert all(same(mine, theirs) for mine, theirs in zip(got, wanted, strict=True)), seed
        recoveries += djinn.stats()["recoveries"]
    assert recoveries > KILLS // 4
    tell(f"{server.starts - kills_before} workers killed with `kill -9` at random moments of {3 * seed} programs",
         f"0 wrong results, 0 hangs, {recoveries} sessions recovered, in {time.monotonic() - began:.0f} s")
