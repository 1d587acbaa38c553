"""Random numbers: one stream for the session, streams of explicit generators, and what saves and restores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recording.believed_cuda import believed_cuda
from support.recording.eager import DEVICE, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint


def _generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FACTORIES: dict[str, Callable[[str, torch.Generator], torch.Tensor]] = {
    "randn": lambda device, g: torch.randn(5, device=device, generator=g),
    "rand": lambda device, g: torch.rand(3, 3, device=device, generator=g, dtype=torch.float64),
    "randperm": lambda device, g: torch.randperm(10, device=device, generator=g),
    "randint": lambda device, g: torch.randint(9, (4,), device=device, generator=g),
    "randint_low": lambda device, g: torch.randint(-3, 9, (4,), device=device, generator=g),
    "normal_floats": lambda device, g: torch.normal(0.0, 1.0, (4,), device=device, generator=g),
    "normal_tensors": lambda device, g: torch.normal(_ones(device), _ones(device) * 2, generator=g),
    "normal_mean": lambda device, g: torch.normal(_ones(device), 2.0, generator=g),
    "normal_std": lambda device, g: torch.normal(2.0, _ones(device), generator=g),
    "bernoulli": lambda device, g: torch.bernoulli(_ones(device) / 2, generator=g),
    "bernoulli_p": lambda device, g: torch.bernoulli(_ones(device), 0.5, generator=g),
    "multinomial": lambda device, g: torch.multinomial(_ones(device), 3, generator=g),
    "poisson": lambda device, g: torch.poisson(_ones(device) * 3, generator=g),
    "normal_": lambda device, g: _ones(device).normal_(generator=g),
    "uniform_": lambda device, g: _ones(device).uniform_(1, 3, generator=g),
    "bernoulli_": lambda device, g: _ones(device).bernoulli_(0.5, generator=g),
    "exponential_": lambda device, g: _ones(device).exponential_(generator=g),
    "geometric_": lambda device, g: _ones(device).geometric_(0.5, generator=g),
    "cauchy_": lambda device, g: _ones(device).cauchy_(generator=g),
    "log_normal_": lambda device, g: _ones(device).log_normal_(generator=g),
    "random_": lambda device, g: _ones(device).random_(generator=g),
    "kaiming": lambda device, g: nn.init.kaiming_uniform_(torch.empty(3, 4, device=device), generator=g),
    "trunc_normal": lambda device, g: nn.init.trunc_normal_(torch.empty(3, 4, device=device), generator=g),
    "orthogonal": lambda device, g: nn.init.orthogonal_(torch.empty(3, 4, device=device), generator=g),
}


def _ones(device: str) -> torch.Tensor:
    return torch.ones(7, device=device)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_generator_passed_explicitly_draws_and_advances_as_in_eager(name: str) -> None:
    def program(device: str) -> list[Any]:
        generator = _generator()
        first, second = (FACTORIES[name](device, generator) for _ in range(2))
        return [first, second, generator.get_state(), torch.randn(2, generator=generator)]

    first, second, *_ = assert_same(program)
    assert not torch.equal(first.cpu(), second.cpu()), "the generator did not advance"


def test_the_streams_do_not_mix() -> None:
    def program(device: str) -> list[torch.Tensor]:
        one, other = _generator(1), _generator(2)
        return [
            torch.randn(3, device=device), torch.randn(3, device=device, generator=one), torch.randn(3, device=device),
            torch.randn(3, device=device, generator=other), torch.randn(3, device=device, generator=one),
            F.dropout(_ones(device)), torch.randn(3, generator=one), torch.randn(3, device=device, generator=one),
            torch.randn(3, device=device),
        ]

    made = assert_same(program)
    assert len({tuple(tensor.tolist()) for tensor in made}) == len(made)


def test_a_generator_survives_a_draw_that_fails() -> None:
    def program(device: str) -> list[Any]:
        generator = _generator()
        with pytest.raises(RuntimeError):
            torch.multinomial(-_ones(device), 2, generator=generator)
        return [torch.randn(2, device=device), torch.randn(2, device=device, generator=generator)]

    assert_same(program)


def test_a_generator_of_another_kind_of_device_is_refused_as_in_eager() -> None:
    refusal = "Expected a 'cuda' device type for generator but found 'cpu'"
    with believed_cuda(), pytest.raises(RuntimeError, match=refusal):
        torch.randn(3, device=DEVICE, generator=_generator())


def test_seeds_begin_the_stream_anew() -> None:
    def program(device: str) -> list[Any]:
        first = torch.rand(3, device=device)
        torch.manual_seed(0)
        again = torch.rand(3, device=device)
        torch.manual_seed(-1)
        return [first, again, torch.rand(3, device=device), torch.initial_seed()]

    first, again, other, _ = assert_same(program)
    assert torch.equal(first.cpu(), again.cpu())
    assert not torch.equal(first.cpu(), other.cpu())


@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.rrelu])
def test_dropouts_draw_as_in_eager(function: Callable[..., torch.Tensor]) -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.full((3, 4, 5), -1.0, device=device, requires_grad=True)
        y = function(x, training=True)
        (y * y).sum().backward()
        assert x.grad is not None
        return [y, x.grad, function(x, training=True)]

    y, _, other = assert_same(program)
    assert not torch.equal(y.cpu(), other.cpu())


def _module(device: str) -> Any:
    return torch if device == "cpu" else torch.remote_accelerator


def test_states_are_saved_and_restored() -> None:
    def program(device: str) -> list[torch.Tensor]:
        state = _module(device).get_rng_state()
        first = torch.rand(3, device=device)
        _module(device).set_rng_state(state)
        return [first, torch.rand(3, device=device), F.dropout(_ones(device))]

    first, again, _ = assert_same(program)
    assert torch.equal(first.cpu(), again.cpu())


@pytest.mark.parametrize("state", [torch.zeros(3), torch.zeros(3, dtype=torch.uint8), "no state"])
def test_a_wrong_state_is_refused_at_once_and_changes_nothing(state: Any) -> None:
    def program(device: str) -> list[Any]:
        with pytest.raises((RuntimeError, TypeError)) as caught:
            _module(device).set_rng_state(state)
        return [caught.type.__name__, torch.randn(3, device=device)]

    assert_same(program)


def test_fork_rng_leaves_the_stream_as_it_was() -> None:
    def program(device: str) -> list[torch.Tensor]:
        kind = "cuda" if device == "cpu" else "remote_accelerator"
        with torch.random.fork_rng(devices=[] if device == "cpu" else [0], device_type=kind):
            torch.manual_seed(5)
            inside = torch.randn(3, device=device)
        return [inside, torch.randn(3, device=device)]

    assert_same(program)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_draws_the_same_numbers_again(use_reentrant: bool) -> None:
    def program(device: str) -> list[Any]:
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).to(device)
        x = torch.arange(18.0).reshape(3, 6).to(device).requires_grad_()
        torch.manual_seed(1)
        y = checkpoint(model, x, use_reentrant=use_reentrant, preserve_rng_state=True)
        between = torch.randn(3, device=device)
        y.sum().backward()
        return [y, between, x.grad, model[0].weight.grad, torch.randn(3, device=device)]

    assert_same(program)


def test_local_generators_and_seeds_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    torch.randn(3, device=DEVICE, generator=_generator())
    torch.randn(3, device=DEVICE).sum().item()
    assert torch.equal(torch.randn(3), expected)
