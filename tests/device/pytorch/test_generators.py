"""``torch.Generator(device="remote_accelerator")`` draws what a CPU generator of the same seed draws on the CPU."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recording.eager import DEVICE

import djinn
from djinn.errors import SessionClosedError

DRAWS: dict[str, Callable[[Any, torch.Generator], torch.Tensor]] = {
    "randn": lambda device, generator: torch.randn(5, device=device, generator=generator),
    "rand": lambda device, generator: torch.rand(2, 3, device=device, generator=generator),
    "randint": lambda device, generator: torch.randint(0, 99, (7,), device=device, generator=generator),
    "randperm": lambda device, generator: torch.randperm(9, device=device, generator=generator),
    "multinomial": lambda device, generator: torch.multinomial(torch.ones(6, device=device), 4, generator=generator),
    "bernoulli_": lambda device, generator: torch.ones(8, device=device).bernoulli_(0.4, generator=generator),
    "normal": lambda device, generator: torch.normal(torch.zeros(3, device=device), 2.0, generator=generator),
    "poisson": lambda device, generator: torch.poisson(torch.full((4,), 3.0, device=device), generator=generator),
    "exponential_": lambda device, generator: torch.ones(3, device=device).exponential_(generator=generator),
    "kaiming": lambda device, generator: torch.nn.init.kaiming_uniform_(
        torch.empty(3, 3, device=device), generator=generator),
    "trunc_normal": lambda device, generator: torch.nn.init.trunc_normal_(
        torch.empty(5, device=device), generator=generator),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_eager_and_leave_the_session_alone(name: str) -> None:
    def drawn(device: Any) -> list[torch.Tensor]:
        torch.manual_seed(11)
        generator = torch.Generator(device=device).manual_seed(3)
        made = []
        for _ in range(2):
            made += [DRAWS[name](device, generator), torch.nn.functional.dropout(torch.ones(9, device=device))]
        return [tensor.cpu() for tensor in made]

    for there, here in zip(drawn(DEVICE), drawn("cpu"), strict=True):
        assert torch.equal(there, here)


def test_draws_wait_for_nothing() -> None:
    generator = torch.Generator(DEVICE)
    torch.randn(2, device=DEVICE, generator=generator).cpu()
    djinn.reset_stats()
    made = [torch.randn(2, device=DEVICE, generator=generator) for _ in range(20)]
    made[-1].cpu()
    assert djinn.stats()["round_trips"] == 1


def test_states_can_be_kept_set_cloned_and_pickled() -> None:
    def drawn(device: Any) -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(5)
        made = [generator.get_state()]
        torch.randn(3, device=device, generator=generator)
        state = generator.get_state()
        others = [generator.clone_state(), pickle.loads(pickle.dumps(generator)), copy.deepcopy(generator),
                  torch.Generator(device).set_state(state)]
        for each in (generator, *others):
            assert each.device == torch.device(device)
            made += [torch.randn(3, device=device, generator=each), torch.tensor(float(each.initial_seed()))]
        generator.set_state(state)
        return [tensor.cpu() for tensor in (*made, state, torch.randn(3, device=device, generator=generator))]

    for there, here in zip(drawn(DEVICE), drawn("cpu"), strict=True):
        assert torch.equal(there, here)


def test_seeds_are_those_of_any_generator() -> None:
    generator, usual = torch.Generator(DEVICE), torch.Generator()
    assert generator.initial_seed() == usual.initial_seed()
    assert torch.equal(torch.randn(3, device=DEVICE, generator=generator).cpu(), torch.randn(3, generator=usual))
    assert generator.manual_seed(-1).initial_seed() == usual.manual_seed(-1).initial_seed()
    assert generator.seed() == generator.initial_seed() != 2**64 - 1


def test_what_is_no_state_is_refused() -> None:
    generator = torch.Generator(DEVICE)
    with pytest.raises(RuntimeError, match="size"):
        generator.set_state(torch.zeros(7, dtype=torch.uint8))
    with pytest.raises(TypeError):
        generator.set_state(torch.zeros(5056))
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.Generator("remote_accelerator:5")


def test_a_draw_that_fails_leaves_both_streams_usable() -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    torch.manual_seed(2)
    failing = torch.multinomial(torch.tensor([-1.0, 2.0], device=DEVICE), 1, generator=generator)
    with pytest.raises(RuntimeError):
        failing.cpu()
    assert torch.equal(torch.randn(3, device=DEVICE, generator=generator).cpu(),
                       torch.randn(3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.randn(3, device=DEVICE).cpu(), torch.randn(3, generator=torch.Generator().manual_seed(2)))


def test_it_ends_with_its_session_and_can_be_seeded_anew() -> None:
    generator = torch.Generator(DEVICE)
    torch.randn(3, device=DEVICE, generator=generator)
    djinn.shutdown()
    with pytest.raises(SessionClosedError):
        torch.randn(3, device=DEVICE, generator=generator)
    generator.manual_seed(4)
    assert torch.equal(torch.randn(3, device=DEVICE, generator=generator).cpu(),
                       torch.randn(3, generator=torch.Generator().manual_seed(4)))


def test_generators_of_other_devices_are_what_they_were() -> None:
    assert type(torch.Generator()) is torch._C.Generator
    assert type(torch.Generator(device="cpu")) is torch._C.Generator
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.Generator(DEVICE), torch._C.Generator)
    assert not isinstance(torch.ones(1), torch.Generator)
    torch.Generator(DEVICE)
    gc.collect()
    assert torch.equal(torch.randn(2, generator=torch.Generator().manual_seed(1)),
                       torch.randn(2, generator=torch.Generator().manual_seed(1)))
