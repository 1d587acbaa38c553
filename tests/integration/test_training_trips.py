"""What a training step waits for: counted, over a guarded server that does not answer early."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import djinn

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
