"""What a training step waits for: counted, over a guarded server that does not answer early."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import djinn
from djinn_plugins.device.interceptor.remote_numbers import TAKING

pytestmark = pytest.mark.usefixtures("on_a_server")
DEVICE = "remote_accelerator:0"


@pytest.fixture(autouse=True)
def _anew() -> None:
    djinn.init(early_answers=False)


def _clip(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()


def _scaled(clips: bool) -> Callable[[torch.nn.Module, torch.optim.Optimizer, torch.Tensor], None]:
    scaler = torch.amp.GradScaler("remote_accelerator", init_scale=4.0)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def _trips(step: Callable[[torch.nn.Module, torch.optim.Optimizer, torch.Tensor], None], *, fused: bool) -> list[int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    data = torch.randn(4, 8).to(DEVICE)
    trips = []
    for _ in range(8):
        trips.append(djinn.stats()["round_trips"])
        step(model, optimizer, model(data).square().mean())
        optimizer.zero_grad()
    djinn.synchronize()
    return [after - before for before, after in pairwise(trips)][2:]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_clipping_waits_for_nothing(fused: bool) -> None:
    assert set(_trips(_clip, fused=fused)) == {0}


@pytest.mark.parametrize("clips", [False, True], ids=["scaled", "scaled and clipped"])
def test_a_gradient_scaler_waits_for_nothing_with_a_fused_optimizer(clips: bool) -> None:
    assert set(_trips(_scaled(clips), fused=True)) == {0}
    # With others, PyTorch asks whether to make the step.
    assert set(_trips(_scaled(clips), fused=False)) == {1}


_RESUMED = [
    *((name, mode, DEVICE) for name in ("AdamW", "NAdam", "RAdam", "Adagrad", "ASGD", "Adamax")
      for mode in ("", "foreach")),
    ("AdamW", "fused", DEVICE), ("AdamW", "capturable", DEVICE), ("NAdam", "", "cpu"), ("ASGD", "", "cpu")]


@pytest.mark.parametrize(("name", "mode", "place"), _RESUMED)
def test_resumed_training_waits_for_nothing_and_goes_on_as_eager_does(name: str, mode: str, place: str) -> None:
    def trained(device: str, *, resumes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(device)
        data = torch.randn(4, 3).to(device)
        options = {"foreach": None} if mode == "fused" else {"foreach": False}
        options |= {mode: True} if mode else {}
        optimizer, saved = getattr(torch.optim, name)(model.parameters(), 0.01, **options), io.BytesIO()
        for turn in range(7):
            if turn == 2 and resumes:
                torch.save(optimizer.state_dict(), saved)
                saved.seek(0)
                optimizer = getattr(torch.optim, name)(model.parameters(), 0.01, **options)
                optimizer.load_state_dict(torch.load(saved, map_location=place))
                djinn.synchronize()
                djinn.reset_stats()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.parameters()]

    got = trained(DEVICE, resumes=True)
    assert djinn.stats()["round_trips"] == 0
    # PyTorch refuses capturable optimizers on a CPU.
    wanted = trained(DEVICE if mode == "capturable" else "cpu", resumes=False)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(got, wanted, strict=True))


def test_accumulated_losses_are_read_in_one_round_trip_a_step() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trips = []
    for _ in range(4):
        before, losses = djinn.stats()["round_trips"], []
        for _ in range(4):
            loss = model(torch.randn(4, 8).to(DEVICE)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert sum(loss.item() for loss in losses) > 0
        trips.append(djinn.stats()["round_trips"] - before)
    assert trips == 4 * [1]


def _taken(function: str, device: str, dtype: torch.dtype) -> tuple[int, list[torch.Tensor]]:
    """Call a function of the list that takes numbers, with one that the device has computed."""
    torch.manual_seed(0)
    vector, other, matrix = (torch.rand(*size).mul(9).to(dtype).to(device) for size in ((3,), (3,), (3, 3)))
    number, matrices = (vector + other).sum() * 3, torch.stack([matrix, matrix.t()])
    index, name = torch.tensor([2, 0, 2]).to(device), function.removesuffix("_")
    operands: dict[str, tuple[Any, ...]] = {
        "addmm": (matrix, matrix.clone(), matrix + 1), "addmv": (vector, matrix, other),
        "addr": (matrix, vector, other), "addbmm": (matrix, matrices, matrices),
        "baddbmm": (matrices, matrices.clone(), matrices + 1),
        "index_add": (vector, 0, index, other), "addcmul": (vector, other, vector), "addcdiv": (vector, other, vector),
        "_foreach_add": ([vector, matrix], [other, matrix + 1]), "_foreach_sub": ([vector], [other]),
        **dict.fromkeys(("_foreach_addcmul", "_foreach_addcdiv"),
                        ([vector, matrix], [other, matrix + 1], [other, matrix]))}
    args = operands.get(name, (vector, other))
    djinn.synchronize()
    before = djinn.stats()["round_trips"]
    word = "value" if "addc" in name else "alpha"
    call = getattr(torch, function, None) or getattr(torch.Tensor, function)
    made = call(*args, **{word: number}, **({"beta": number} if name in {"addmm", "baddbmm"} else {}))
    trips = djinn.stats()["round_trips"] - before
    leaves = torch.utils._pytree.tree_leaves((args, made))
    return trips, [leaf.cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("function", dict.fromkeys(function.__name__ for function in TAKING))
def test_a_number_that_only_the_server_needs_stays_there(function: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        if dtype is torch.int64 and "addcdiv" in function:
            continue
        trips, got = _taken(function, DEVICE, dtype)
        assert trips == 0
        for mine, wanted in zip(got, _taken(function, "cpu", dtype)[1], strict=True):
            assert torch.equal(mine, wanted)


def test_a_number_of_the_server_is_asked_for_where_a_gradient_or_a_truth_value_needs_it() -> None:
    def gradient(device: str) -> list[float]:
        one = torch.tensor([1.0, 2.0], requires_grad=True, device=device)
        version = one.detach().add_(one.detach(), alpha=one.detach().sum())._version
        (found,) = torch.autograd.grad(one.add(one, alpha=(one * one).sum().detach()).sum(), one)
        return [*found.tolist(), version, *one.bool().add(one.bool(), alpha=one.sum() > 0).tolist()]

    assert gradient(DEVICE) == gradient("cpu")
    with pytest.raises(RuntimeError, match="integral"):
        torch.arange(3, device=DEVICE).add(1, alpha=torch.rand((), device=DEVICE))


def test_a_search_along_a_line_waits_only_where_python_decides() -> None:
    def found(device: str) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
        x, y = torch.rand(16, 4).to(device), torch.rand(16, 1).to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", history_size=20, max_iter=10)
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            losses.append((model(x) - y).square().mean())
            losses[-1].backward()
            return losses[-1]

        before = djinn.stats()["round_trips"]
        optimizer.step(closure)
        return djinn.stats()["round_trips"] - before, [torch.stack(losses).detach().cpu(), *(
            parameter.detach().cpu() for parameter in model.parameters())]

    trips, got = found(DEVICE)
    wanted = found("cpu")[1]
    assert all(torch.equal(mine, ours) for mine, ours in zip(got, wanted, strict=True))
    # Of the loss, its slope and the ends of the search; 130 where each number of the history is asked for.
    assert trips <= 5 * len(got[0])
