"""States of random numbers are taken as a whole: those that a generator has, and none whose fields do not fit."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import djinn
from djinn_plugins.common.operators.generators import RemoteGenerator
from djinn_plugins.common.operators.random_exchange import exchange_random_state
from djinn_plugins.common.operators.random_states import checked_state
from djinn_plugins.executor.torch.random import TorchRandomState

CPU = torch.device("cpu")
LEFT, SEEDED, NEXT, DOUBLE, SINGLE = 8, 12, 16, 5040, 5052
"""Where the fields are."""


def drawn(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    torch.rand(count, generator=generator)
    return generator.get_state()


def changed(at: int, form: str, value: int) -> torch.Tensor:
    """Give a state another number in one field. None of them leads a generator beyond its numbers."""
    state = drawn(10)
    found = bytearray(state.numpy().tobytes())
    struct.pack_into(form, found, at, value)
    return torch.frombuffer(found, dtype=torch.uint8)


WRONG = {
    "fewer are left than there are": changed(LEFT, "=i", 600),
    "none is left": changed(LEFT, "=i", 0),
    "an earlier one is next": changed(NEXT, "=Q", 9),
    "never seeded": changed(SEEDED, "=i", 0),
    "neither with a double nor without": changed(DOUBLE, "=i", 2),
    "neither with a float nor without": changed(SINGLE, "=B", 2),
    "a byte less": drawn(10)[:-1].clone(),
    "of signed bytes": drawn(10).view(torch.int8),
}


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_whatever_a_generator_has_drawn_its_state_is_taken(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draws: list[Callable[[], Any]] = [
        lambda: torch.rand(1, generator=generator), lambda: torch.randn(1, generator=generator),
        lambda: torch.randn(1, generator=generator, dtype=torch.float64), lambda: torch.randn(20, generator=generator),
        lambda: torch.randperm(7, generator=generator)]
    for draw, _ in zip(itertools.cycle(draws), range(400), strict=False):
        state = generator.get_state()
        assert torch.equal(checked_state("cpu", state), state)
        draw()


@pytest.mark.parametrize("name", list(WRONG))
def test_a_state_that_no_generator_has_leaves_the_stream_as_it_was(name: str) -> None:
    """By each way in: a session's own numbers, an operation of a program, and a generator of a client."""
    own = TorchRandomState(CPU, 5, threading.RLock(), lambda: torch.default_generator)
    remote = RemoteGenerator("remote_accelerator")
    before = own.get(), torch.get_rng_state(), remote.initial_seed()
    exchange = exchange_random_state()
    try:
        for take in (own.set, exchange, remote.set_state):
            with pytest.raises((RuntimeError, TypeError)):
                take(WRONG[name])
        assert torch.equal(own.get(), before[0])
        assert torch.equal(torch.get_rng_state(), before[1])
        assert remote.initial_seed() == before[2]
    finally:
        torch.set_rng_state(before[1])


def test_a_served_session_refuses_it_and_goes_on(server: Any) -> None:
    djinn.init(server=server.address)
    session = djinn.ensure_initialized()
    torch.manual_seed(7)
    session.set_random_state(WRONG["fewer are left than there are"])
    with pytest.raises(RuntimeError, match="do not fit each other"):
        session.random_state()
    given = WRONG["an earlier one is next"].to("remote_accelerator:0")
    with pytest.raises(RuntimeError, match="do not fit each other"):
        exchange_random_state()(given).cpu()
    drawn_there = torch.rand(5, device="remote_accelerator:0").cpu()
    assert torch.equal(drawn_there, torch.rand(5, generator=torch.Generator().manual_seed(7)))
    djinn.shutdown()
