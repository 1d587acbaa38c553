"""GPT-2 124M is trained far away, and its loss is used in each step, or only logged."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import gpt2

import djinn

DEVICE = "remote_accelerator:0"
DELAY_S = 0.015
STEPS = 3


class _Training:
    def __init__(self, device: str) -> None:
        self._model = gpt2.gpt2(n_positions=64).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._tokens = (torch.arange(128).view(2, 64) * 31 % 1000).to(device)

    def steps(self, read: Callable[[torch.Tensor], Any]) -> list[Any]:
        """Train on, and let every loss be read; the last wait is for everything."""
        losses = []
        for _ in range(STEPS):
            loss = self._model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(read(loss.detach()))
        next(self._model.parameters())[0, 0].item()
        return losses


@pytest.fixture
def trainings(server_address: str, delay: Callable[[str, float], str]) -> tuple[_Training, _Training]:
    djinn.init(server=delay(server_address, DELAY_S))
    made = _Training("cpu"), _Training(DEVICE)
    for training in made:
        training.steps(torch.Tensor.item)
    return made


def test_training_read(compare: Callable[..., Any], publish: Callable[..., None],
                       trainings: tuple[_Training, _Training]) -> None:
    rival, ours = trainings
    read: tuple[list[float], list[float]] = ([], [])
    comparison = compare(lambda: read[0].extend(rival.steps(torch.Tensor.item)),
                         lambda: read[1].extend(ours.steps(torch.Tensor.item)))
    torch.testing.assert_close(read[1], read[0], rtol=1e-5, atol=0)
    publish(comparison.cost, comparison.details)


def test_training_logged(compare: Callable[..., Any], publish: Callable[..., None],
                         trainings: tuple[_Training, _Training]) -> None:
    rival, ours = trainings
    log, lines = logging.Logger("training"), io.StringIO()  # noqa: LOG001  # pytest's handlers would wait
    handler = djinn.LaterHandler(logging.StreamHandler(lines))
    log.addHandler(handler)
    wanted: list[float] = []
    djinn.reset_stats()
    comparison = compare(lambda: wanted.extend(rival.steps(torch.Tensor.item)),
                         lambda: ours.steps(lambda loss: log.info("%.4f", djinn.later(loss))))
    trips = djinn.stats()["round_trips"]
    handler.flush()
    torch.testing.assert_close([float(line) for line in lines.getvalue().split()], wanted, rtol=0, atol=2e-4)
    assert trips <= len(wanted) / STEPS
    publish(comparison.cost, comparison.details)
