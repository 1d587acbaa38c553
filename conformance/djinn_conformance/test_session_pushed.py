"""The law of sessions about early answers: loops whose server runs ahead, with exceptions in between."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from djinn.session.session import Session
from djinn_conformance.assertions import expect
from djinn_conformance.compositions import runs_ahead
from djinn_conformance.laws import is_thorough, law
from djinn_conformance.subjects import Subject

_LOOPS = 60 if is_thorough() else 12
_ROUNDS = 24
_PAUSES_S = (0.0, 0.0, 0.001, 0.004)
"""Pauses of a loop: its server runs ahead in them."""
_CPU = torch.device("cpu")


@attrs.define
class _State:
    """The values of a loop."""

    value: torch.Tensor
    weight: torch.Tensor
    cache: torch.Tensor
    row: torch.Tensor
    kept: list[Any] = attrs.field(factory=list)


def _fail(state: _State) -> object:
    try:
        state.value.gather(0, (state.weight * 0 + 9).long()).sum().item()
    except RuntimeError as error:
        return type(error)
    return None


_EVENTS: Sequence[Callable[[_State], object]] = (
    lambda state: state.weight.add_(0.5) is None, lambda state: state.weight.view(-1)[1:].mul_(-1.0) is None,
    lambda state: setattr(state, "value", torch.full((4,), 2.0).to(state.value.device)),
    lambda state: setattr(state, "value", state.value * 3.0), lambda state: state.weight.tolist(),
    lambda state: state.kept.append(state.value), lambda state: state.kept.clear(),
    lambda state: torch.manual_seed(3) is None,
    lambda state: torch.rand(3, device=state.value.device).tolist(), _fail,
    lambda state: setattr(state, "weight", state.weight.clone()), lambda state: state.value.detach().zero_() is None,
    lambda state: state.cache.tolist(), lambda state: state.cache.clone().sum().item(),
    lambda state: state.cache[1].add_(1.0) is None, lambda state: state.row.fill_(2) is None,
)


_ANEW: Sequence[Callable[[_State], object]] = (
    lambda state: setattr(state, "value", (state.weight + 1.0) * 0.25),
    lambda state: setattr(state, "value", (state.weight.abs() - 1.0).tolist() and state.weight * 0.5),
    lambda state: setattr(state, "value", torch.full((4,), 2.0).to(state.value.device)),
)
"""Ways to begin a loop anew: its first round reads what another program made, or what was uploaded."""


@law("session.pushed_is_asked")
def test_pushed_is_asked(subject: Subject, session: Session) -> None:
    """Draw loops, some with random numbers, a cache, data, or sizes that depend on values; change some rounds."""
    before = session.stats()["answered_early"]
    for seed in range(_LOOPS):
        plan = random.Random(seed)
        draws, reads = plan.random() < 0.5, plan.randint(1, 3)
        writes, uploads, selects = (plan.random() < 0.5 for _ in range(3))
        events = {plan.randrange(6, _ROUNDS): plan.choice(_EVENTS) for _ in range(plan.randint(0, 3))}
        if plan.random() < 0.5:
            # The loop begins anew, again and again.
            events.update(dict.fromkeys(range(5, _ROUNDS, 6), plan.choice(_ANEW)))
        pauses_s = [plan.choice(_PAUSES_S) for _ in range(_ROUNDS)]
        run = partial(_run, draws=draws, writes=writes, uploads=uploads, selects=selects, reads=reads, events=events)
        wanted, got = run(_CPU, pauses_s=[0.0] * _ROUNDS), run(session.device, pauses_s=pauses_s)
        for count, (mine, ours) in enumerate(zip(got, wanted, strict=True)):
            expect(mine == ours, f"value {count}", got=mine, wanted=repr(ours), where=f"{subject}: loop {seed}")
    count = session.stats()["answered_early"] - before
    expect(count >= _LOOPS or not runs_ahead(subject), "values that were sent early and used", got=count,
           wanted="one in each loop", where=str(subject))


def _run(device: torch.device, *, draws: bool, writes: bool, uploads: bool, selects: bool, reads: int,
         events: dict[int, Callable[[_State], object]], pauses_s: Sequence[float]) -> list[object]:
    torch.manual_seed(7)
    state = _State(torch.arange(4.0).to(device), torch.linspace(-1.0, 1.0, 4).to(device),
                   torch.zeros(5, 4).to(device), torch.zeros(1, dtype=torch.long).to(device))
    seen: list[object] = []
    for count in range(_ROUNDS):
        state.value = state.value * 0.5 + state.weight
        if draws:
            state.value = state.value + torch.rand_like(state.value)
        if writes:
            state.cache.index_copy_(0, state.row, state.value[None])
            state.row.add_(1).remainder_(5)
            state.value = state.value + state.cache.sum(0) * 0.125
        if uploads:
            state.value = state.value + torch.full((4,), 0.125 * (count % 3)).to(device)
        if selects:
            chosen = state.value[state.value > 0.25]
            seen += [chosen.shape, chosen.sum().item()]
        seen.extend(state.value[read].item() for read in range(reads))
        if count in events:
            seen.append(events[count](state))
        time.sleep(pauses_s[count])
    seen += state.value.tolist()
    return seen
