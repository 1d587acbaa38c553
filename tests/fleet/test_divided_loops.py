"""Loops that are divided between two servers, which send each other values before the client has requested them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from support.servers.fleet import kill

import djinn

LOOPS = 20
ROUNDS = 40
PAUSES_S = (0.0, 0.0, 0.002, 0.006)
"""Pauses of a loop: its servers run ahead in them."""
LONG_S = 0.03
"""A pause before a guess turns out to be wrong."""
FAILOVER_S = 0.3
FIRST, SECOND = "remote_accelerator:0", "remote_accelerator:1"


@attrs.define
class Loop:
    """The values of a loop: the first two on one device, the others on another."""

    value: torch.Tensor
    weight: torch.Tensor
    other: torch.Tensor
    cache: torch.Tensor
    row: torch.Tensor
    factor: float = 0.5
    kept: list[Any] = attrs.field(factory=list)

    @classmethod
    def on(cls, first: str, second: str) -> Loop:
        """Begin a loop."""
        return cls(torch.arange(4.0).to(first), torch.linspace(-1.0, 1.0, 4).to(first), torch.ones(4).to(second),
                   torch.zeros(5, 4).to(second), torch.zeros(1, dtype=torch.long).to(second))


def fails(loop: Loop) -> object:
    try:
        loop.other.gather(0, (loop.other * 0 + 9).long()).sum().item()
    except RuntimeError as error:
        return type(error)
    return None


EVENTS: Sequence[Callable[[Loop], object]] = (
    lambda loop: loop.weight.add_(0.5) is None, lambda loop: loop.value.mul_(2.0) is None,
    lambda loop: loop.other.add_(1.0) is None, lambda loop: loop.cache[1].add_(1.0) is None,
    lambda loop: setattr(loop, "value", torch.full((4,), 2.0).to(loop.value.device)),
    lambda loop: setattr(loop, "other", loop.other.clone()),
    lambda loop: setattr(loop, "other", loop.value.to(loop.other.device) * 2.0),
    lambda loop: loop.weight.tolist(), lambda loop: loop.cache.tolist(), lambda loop: loop.other.tolist(),
    lambda loop: loop.kept.append((loop.value, loop.other)), lambda loop: loop.kept.clear(),
    lambda loop: torch.manual_seed(3) is None, lambda loop: loop.row.fill_(2) is None, fails,
)


def run(loop: Loop, plan: random.Random) -> list[object]:
    torch.manual_seed(7)
    writes, both = plan.random() < 0.5, plan.random() < 0.75
    events = {plan.randrange(6, ROUNDS): plan.choice(EVENTS) for _ in range(plan.randint(0, 2))}
    if plan.random() < 0.25:
        events.update(dict.fromkeys(range(7, ROUNDS, 8), plan.choice(EVENTS)))
    pauses_s = [plan.choice(PAUSES_S) for _ in range(ROUNDS)]
    # Only the first server gets another number than it expects, when the second one has computed with what that sent.
    changes = {plan.randrange(14, ROUNDS) for _ in range(plan.randint(0, 2))}
    seen: list[object] = []
    for count in range(ROUNDS):
        loop.value = loop.value * loop.factor + loop.weight
        moved = loop.value.to(loop.other.device)
        loop.other = loop.other * 0.25 + moved
        if writes:
            loop.cache.index_copy_(0, loop.row, loop.other[None])
            loop.row.add_(1).remainder_(5)
            loop.other = loop.other + loop.cache.sum(0) * 0.125
        loop.value = loop.value + loop.other.to(loop.value.device) * 0.5
        if both:
            seen.append(loop.other.sum().item())
        seen.append(loop.value[1].item())
        if count in events:
            seen.append(events[count](loop))
        if count in changes:
            loop.factor += 0.125
        if loop.value.device.type != "cpu":
            time.sleep(LONG_S if count in changes else pauses_s[count])
    return [*seen, loop.value.tolist(), loop.other.tolist()]


@pytest.fixture
def two_servers(start_server: Callable[..., Any]) -> list[Any]:
    servers = [start_server() for _ in range(2)]
    djinn.init(servers=[server.address for server in servers], failover_timeout_s=FAILOVER_S)
    return servers


def test_loops_that_are_divided_give_what_eager_gives(two_servers: list[Any]) -> None:
    before = djinn.stats()["answered_early"]
    for seed in range(LOOPS):
        wanted = run(Loop.on("cpu", "cpu"), random.Random(seed))
        got = run(Loop.on(FIRST, SECOND), random.Random(seed))
        for count, (mine, ours) in enumerate(zip(got, wanted, strict=True)):
            assert mine == ours, f"loop {seed}, value {count}"
    assert djinn.stats()["answered_early"] - before >= LOOPS


def test_what_was_computed_from_another_servers_wrong_guess_is_never_used(two_servers: list[Any]) -> None:
    made: list[list[float]] = []
    for devices in (("cpu", "cpu"), (FIRST, SECOND)):
        loop, seen = Loop.on(*devices), list[float]()
        for count in range(ROUNDS):
            # Nothing but this number is other than expected, and only the first server receives it.
            factor = 0.5 + 0.125 * (count > 9 and count % 6 == 0)
            loop.value = loop.value * factor + loop.weight
            loop.other = loop.other * 0.25 + loop.value.to(devices[1])
            loop.value = loop.value + loop.other.to(devices[0]) * 0.5
            seen += [loop.other.sum().item(), loop.value[1].item()]
            time.sleep(LONG_S if devices[0] == FIRST else 0)
        made.append(seen)
    assert made[0] == made[1]
    assert djinn.stats()["answered_early"] > 5


def test_loops_with_random_numbers_repeat_themselves_with_and_without_early_answers(two_servers: list[Any]) -> None:
    made: dict[bool, list[object]] = {}
    for is_early in (True, False):
        djinn.init(servers=[server.address for server in two_servers], early_answers=is_early)
        torch.manual_seed(5)
        loop, seen = Loop.on(FIRST, SECOND), list[object]()
        for _ in range(ROUNDS):
            loop.value = loop.value * 0.5 + torch.rand_like(loop.value)
            loop.other = loop.value.to(SECOND) + torch.rand_like(loop.other)
            loop.value = loop.value + loop.other.to(FIRST)
            seen.append(loop.value[2].item())
            time.sleep(0.002)
        made[is_early] = [*seen, torch.rand(2, device=FIRST).tolist(), torch.rand(2, device=SECOND).tolist()]
    assert made[True] == made[False]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_divided_loop_survives_the_death_of_a_server_that_was_ahead(two_servers: list[Any], victim: int) -> None:
    made: list[list[float]] = []
    for devices in (("cpu", "cpu"), (FIRST, SECOND)):
        loop, seen = Loop.on(*devices), list[float]()
        for count in range(ROUNDS):
            loop.value = loop.value * 0.5 + loop.weight
            loop.other = loop.other * 0.25 + loop.value.to(devices[1])
            loop.value = loop.value + loop.other.to(devices[0]) * 0.5
            seen += [loop.other.sum().item(), loop.value[1].item()]
            if devices[0] == FIRST:
                time.sleep(LONG_S if count < ROUNDS // 2 else 0)
                if count == ROUNDS // 2:
                    assert djinn.stats()["answered_early"] > 0
                    kill(two_servers[victim])
        made.append(seen)
    assert made[0] == made[1]
