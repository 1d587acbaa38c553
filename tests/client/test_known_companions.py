"""Integers that a question depends on come with its answer, and spare later round trips: counted, over a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import djinn

pytestmark = pytest.mark.usefixtures("on_a_server")
DEVICE = "remote_accelerator:0"
ROUNDS = 8


@pytest.fixture(autouse=True)
def _anew() -> None:
    djinn.init(early_answers=False)


def _trips_of_rounds(ask: Callable[[int], Any]) -> tuple[list[int], list[Any]]:
    trips, made = [], []
    for number in range(ROUNDS):
        djinn.synchronize()
        djinn.reset_stats()
        made.append(ask(number))
        trips.append(djinn.stats()["round_trips"])
    return trips, made


def _scores(number: int, device: str) -> torch.Tensor:
    return torch.sin(torch.arange(24.0, device=device) * (number + 1.5)).view(4, 6)


def test_what_follows_from_tokens_is_computed_here_once_it_was_asked_for() -> None:
    def ask(device: str) -> Callable[[int], Any]:
        ended = torch.tensor([3, 5]).to(device)

        def once(number: int) -> Any:
            tokens = _scores(number, device).argmax(-1)
            text = torch.cat([torch.arange(3, device=device), tokens])
            is_over = bool(torch.isin(tokens, ended).all())
            return is_over, (text == 2).sum().item(), text.tolist(), torch.isin(tokens, ended).nonzero().shape[0]

        return once

    trips, made = _trips_of_rounds(ask(DEVICE))
    assert made == [ask("cpu")(number) for number in range(ROUNDS)]
    assert trips[2:] == (ROUNDS - 2) * [1]


@pytest.mark.parametrize("write", [
    lambda x: x.add_(1), lambda x: x.view(-1)[1:].zero_(), lambda x: x.data.copy_(torch.ones(4)),
    lambda x: x.detach().masked_fill_(x > 2, 5), lambda x: x.set_(torch.full_like(x, 9)),
], ids=["in place", "through a view", "from here", "through an alias", "set"])
def test_a_write_between_two_questions_is_seen(write: Callable[[torch.Tensor], Any]) -> None:
    def rounds(device: str) -> list[Any]:
        made: list[Any] = []
        for number in range(ROUNDS):
            tokens = _scores(number, device).argmax(-1)
            doubled = tokens * 2
            made.append(bool((tokens > 3).any()))
            if number % 2:
                write(tokens)
            made += [tokens.sum().item(), doubled.tolist(), (tokens + 1).amax().item()]
            if number % 3 == 0:
                write(tokens)
            made += [tokens.tolist(), bool((tokens > 3).any())]
        return made

    assert rounds(DEVICE) == rounds("cpu")


def test_a_value_that_dies_is_not_fetched() -> None:
    def ask(number: int) -> Any:
        tokens = _scores(number, DEVICE).argmax(-1)
        total, most = tokens.sum(), tokens.amax()
        if number % 2:
            del tokens
        return total.item(), most.item()

    _, made = _trips_of_rounds(ask)
    wanted = [_scores(number, "cpu").argmax(-1) for number in range(ROUNDS)]
    assert made == [(tokens.sum().item(), tokens.amax().item()) for tokens in wanted]


def test_what_was_fetched_is_known_and_stays_the_callers() -> None:
    tokens = _scores(1, DEVICE).argmax(-1)
    here = tokens.cpu()
    wanted = here.tolist()
    here.zero_()
    djinn.reset_stats()
    assert (tokens + 1).tolist() == [token + 1 for token in wanted]
    assert tokens.tolist() == wanted
    assert djinn.stats()["round_trips"] == 0
