"""Laws of sessions about how much work a recovery repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from djinn.session.session import Session
from djinn_conformance.assertions import expect, expect_equal, expect_same_tensor
from djinn_conformance.crashes import VirtualTime, let_die, recovering
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject

_NODE_S, _BUDGET_S, _STEPS, _PIECE = 0.001, 0.8, 400, 64
"""A step has some 15 operations: together the steps take seven times the budget."""


def _trained(
    session: Session, asks_every: int, after_step: Callable[[int], None] = lambda step: None
) -> list[torch.Tensor]:
    """Change weights step by step, also through views, with local data and remote random numbers."""
    device = session.device
    session.seed(5)
    weights = [torch.ones(8, 8).to(device), torch.zeros(8, device=device)]
    speeds = [torch.zeros_like(weight) for weight in weights]
    for step in range(_STEPS):
        data = torch.full((4, 8), float(step % 7)).to(device)
        hidden = torch.tanh(data @ weights[0] + weights[1]) * torch.rand(4, 8, device=device)
        for weight, speed, change in zip(weights, speeds, (data.t() @ hidden, hidden.sum(0)), strict=True):
            speed.mul_(0.9).add_(change, alpha=0.01)
            weight.sub_(speed, alpha=0.01)
        weights[0][step % 8].mul_(0.99)
        if asks_every and step % asks_every == 0:
            hidden.sum().item()
        after_step(step)
    return [value.cpu() for value in (*weights, *speeds, torch.rand(3, device=device))]


@law("session.recovery_bounded")
@pytest.mark.parametrize("asks_every", [1, 50, 0], ids=["each step", "each 50 steps", "never"])
def test_recovery_bounded(subject: Subject, session: Session, asks_every: int) -> None:
    """Let each operation take a millisecond, and compute after each step how much work a recovery would repeat."""
    wanted = _trained(session, asks_every)
    clock = VirtualTime(_NODE_S)
    session.flush_after(_PIECE)
    try:
        with recovering(session) as layer:
            clock.rule(layer, _BUDGET_S)

            def check(step: int) -> None:
                if step % 5:
                    return
                layer.journal.compact()
                again_s = layer.journal.node_count * _NODE_S
                expect(again_s <= _BUDGET_S + 2 * _PIECE * _NODE_S, "seconds of work to do again", got=again_s,
                       wanted=f"{_BUDGET_S} and a piece", where=f"{subject}: step {step}, after {clock.now_s:.2f} s")
                if step in (_STEPS // 2, _STEPS - 5):
                    let_die(session)

            got = _trained(session, asks_every, check)
            expect_equal(layer.stats()["recoveries"], 2, "recoveries", f"{subject}")
            for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
                expect_same_tensor(mine, theirs, f"value {number} after two deaths", f"{subject}")
    finally:
        session.flush_after(session.config.flush_every)
