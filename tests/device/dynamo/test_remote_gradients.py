"""``torch.compile(model, backend="djinn")`` with gradients, on models whose tensors are remote, on a guarded server."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import djinn

DEVICE = "remote_accelerator:0"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def served(server: Any, fresh: None) -> None:
    djinn.init(server=server.address)


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="djinn")


def given(number: int = 0) -> torch.Tensor:
    return (torch.arange(12.0).view(3, 4) / 7 - number).to(DEVICE).requires_grad_()


class Trained(nn.Module):
    """A weight with two uses, buffers that are written, random numbers, and a result without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.dropout(F.gelu(self.norm(self.first(x))), 0.3, self.training)
        return self.tied(self.tied(hidden)) + hidden, hidden.detach()


def steps(*, compiles: bool, counts: list[int] | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Trained().to(DEVICE)
    call = compiled(model) if compiles else model
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for number in range(5):
        before = djinn.stats()["operations"]
        made, aside = call(given(number))
        # A use of the weight after the model: gradients have to be added in eager's order.
        loss = made.square().mean() + aside.mean() + model.tied.weight.sin().sum()
        loss.backward()
        if counts is not None:
            counts.append(djinn.stats()["operations"] - before)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.detach().cpu(), *[value.detach().cpu() for value in model.state_dict().values()]]
    return seen


def test_a_training_loop_gives_what_it_gives_uncompiled_and_records_no_pass_again() -> None:
    plain: list[int] = []
    counts: list[int] = []
    wanted, got = steps(compiles=False, counts=plain), steps(compiles=True, counts=counts)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    assert plain[-1] > 2 * counts[-1]
    assert counts[2] == counts[3] == counts[4] < counts[1], "the first two calls are recorded"


def test_a_step_waits_for_nothing() -> None:
    model = Trained().to(DEVICE)
    call = compiled(model)
    for number in range(4):
        djinn.reset_stats()
        call(given(number))[0].sum().backward()
    assert djinn.stats()["round_trips"] == 0


def compared(action: Callable[..., Any], function: Any, times: int = 4) -> None:
    """Expect the same results, or the same refusals, of each call."""
    found = []
    for call in (function, compiled(copy.deepcopy(function) if isinstance(function, nn.Module) else function)):
        torch.manual_seed(1)
        found.append([_outcome(action, call, given(number)) for number in range(times)])
    wanted, got = found
    assert [torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
            for mine, theirs in zip(got, wanted, strict=True)] == [True] * times, (wanted, got)


def _outcome(action: Callable[..., Any], call: Any, x: torch.Tensor) -> Any:
    try:
        made = action(call, x)
    except RuntimeError as error:
        return str(error)[:60]
    return made.detach().cpu()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x * 2)


def _written_weight(model: nn.Linear, x: torch.Tensor) -> torch.Tensor | None:
    made = model(x)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    made.sum().backward()
    return x.grad


def _written_result(call: Any, x: torch.Tensor) -> torch.Tensor | None:
    made = call(x)
    made.add_(1)
    made.sum().backward()
    return x.grad


def _second_backward(call: Any, x: torch.Tensor) -> None:
    loss = call(x).sum()
    loss.backward()
    loss.backward()


def _second_backward_without_values(call: Any, x: torch.Tensor) -> torch.Tensor | None:
    loss = call(x).sum()
    loss.backward()
    loss.backward()
    return x.grad


def _packed(call: Any, x: torch.Tensor) -> torch.Tensor | None:
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: packed.append(item) or len(packed) - 1,
                                                  lambda position: packed[position] * 2):
        made = call(x)
    made.sum().backward()
    return x.grad


def _within_a_checkpoint(call: Any, x: torch.Tensor) -> torch.Tensor | None:
    checkpoint(call, x, use_reentrant=False).sum().backward()
    return x.grad


@pytest.mark.parametrize("action", [
    _written_weight, _written_result, _second_backward, _second_backward_without_values, _packed, _within_a_checkpoint,
], ids=lambda action: action.__name__.strip("_"))
def test_what_autograd_gives_and_refuses(action: Callable[..., Any]) -> None:
    functions = {_written_weight: nn.Linear(4, 4).to(DEVICE), _second_backward: nn.Linear(4, 4).to(DEVICE),
                 _second_backward_without_values: lambda x: x + x}
    compared(action, functions.get(action, sigmoid))


def test_gradients_of_some_results_and_other_gradients_in_each_call() -> None:
    other, turn = torch.ones(3, 4, device=DEVICE).cumsum(0), [0]

    def step(call: Any, x: torch.Tensor) -> torch.Tensor | None:
        turn[0] += 1
        results = call(x, other)
        used = results[:1] if turn[0] % 3 else results[1:]
        # The gradient is sometimes an argument that was saved.
        torch.autograd.backward(used, [other if turn[0] % 2 else torch.ones_like(other)])
        return x.grad

    compared(step, lambda x, y: (x * y, x.exp() * y), times=12)


def _gradient_of(call: Any, x: torch.Tensor) -> torch.Tensor | None:
    # A use before, and one after.
    start = x * 1
    (call(start).sum() + start.sin().sum()).backward()
    return x.grad


class Kept(torch.autograd.Function):
    """Keeps a tensor in another way than autograd's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = 2 * ctx.x * gradient
        return kept


@torch._dynamo.allow_in_graph
def opaque(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = Kept.apply(x * 2)
    return made


@pytest.mark.parametrize("function", [
    lambda x: opaque(x) + 1,
    lambda x: checkpoint(lambda part: F.dropout(part, 0.5).sigmoid(), x, use_reentrant=False) * 2,
    lambda x: Kept.apply(x + torch.rand_like(x)) + 1,
    lambda x: x.exp() * x + x.sigmoid(),
    lambda x: x.mul_(2) * 3,
    lambda x: x.t(),
    lambda x: x.exp().sum(-1).expand(4, 3)[1:].t(),
], ids=["opaque function", "checkpoint", "custom function", "several uses", "argument written", "argument's view",
        "expanded"])
def test_gradients_of_functions(function: Any) -> None:
    compared(_gradient_of, function)


def test_autocast_around_a_call() -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor | None:
        with torch.autocast("remote_accelerator", dtype=torch.bfloat16):
            made = model(x)
        made.float().square().sum().backward()
        return x.grad

    compared(step, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE))


def test_gradients_of_gradients_are_refused() -> None:
    call = compiled(sigmoid)
    for number in range(4):
        x = given()
        made, = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        if number > 1:
            with pytest.raises(RuntimeError, match="no gradient of its gradient"):
                (made.square().sum() + x.sum()).backward()


def test_values_are_freed_with_or_without_a_backward_pass() -> None:
    model = Trained().to(DEVICE)
    call, held = compiled(model), []
    for number in range(8):
        loss = call(given(number))[0].sum()
        if number % 2:
            loss.backward()
            model.zero_grad()
        del loss
        gc.collect()
        djinn.synchronize()
        held.append(djinn.stats()["live_handles"])
    assert held[3:] == [held[3]] * 5, held


def test_another_session_records_anew() -> None:
    model = nn.Linear(4, 4)
    call, wanted = compiled(model), []
    for _ in range(2):
        djinn.init()
        model.to(DEVICE)
        for _ in range(3):
            x = given()
            call(x).sum().backward()
            assert x.grad is not None
            wanted.append(x.grad.cpu())
        model.zero_grad()
        model.cpu()
    assert all(torch.equal(one, wanted[0]) for one in wanted)
