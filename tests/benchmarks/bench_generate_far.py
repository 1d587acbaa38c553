"""GPT-2 124M generates on a server that is 15 ms away in each direction, against local eager."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.models import far_generation, gpt2

import djinn

DEVICE = "remote_accelerator:0"
DELAY_S = 0.015
TURNS, WARMUP_TURNS = 3, 2


@attrs.frozen
class Far:
    """What was measured of one way to generate.

    Attributes:
        comparison: The alternating turns, of local eager and djinn.
        trips: Waits a token.
        sent: Bytes sent a token.
        received: Bytes received a token.
    """

    comparison: Any
    trips: float
    sent: float
    received: float

    @property
    def details(self) -> dict[str, float]:
        """Times, waits and traffic."""
        return {**self.comparison.details, "trips a token": self.trips, "bytes sent a token": self.sent,
                "bytes received a token": self.received}


@pytest.fixture(scope="module")
def model() -> Any:
    return gpt2.gpt2()


@pytest.fixture(scope="module")
def kept() -> dict[str, Far]:
    """What was measured already, by the name of the mode."""
    return {}


@pytest.fixture
def far(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest, model: Any, kept: dict[str, Far]
) -> Callable[[str], Far]:
    """Measures a mode, unless that was done."""

    def measured(name: str) -> Far:
        if name in kept:
            benchmark.pedantic(lambda: None)
            return kept[name]
        start, delay = request.getfixturevalue("server_address"), request.getfixturevalue("delay")
        djinn.init(server=delay(start, DELAY_S))
        mode, there = far_generation.MODES[name], copy.deepcopy(model).to(DEVICE)
        wanted: list[torch.Tensor] = []
        counted: list[dict[str, int]] = []

        def rival() -> None:
            wanted[:] = [far_generation.generated(model, "cpu", mode)]

        def ours() -> None:
            djinn.reset_stats()
            assert torch.equal(far_generation.generated(there, DEVICE, mode), wanted[0])
            counted.append(djinn.stats())

        comparison = request.getfixturevalue("compare")(rival, ours, turns=TURNS, warmup_turns=WARMUP_TURNS)
        kept[name] = Far(comparison, *(
            statistics.mean(stats[counter] for stats in counted[-TURNS:]) / mode.tokens
            for counter in ("round_trips", "bytes_sent", "bytes_received")))
        return kept[name]

    return measured


def test_generate_far(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    measured = far("greedy")
    publish(measured.comparison.cost, measured.details)


def test_generate_far_long(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    measured = far("long")
    publish(measured.comparison.cost, measured.details)


def test_generate_far_sampled(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    measured = far("sampled")
    publish(measured.comparison.cost, measured.details)


def test_generate_far_padded(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    measured = far("padded")
    publish(measured.comparison.cost, measured.details)


def test_generate_far_streamed(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    measured = far("streamed")
    publish(measured.comparison.cost, measured.details)


def test_generate_far_beams(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    measured = far("beams")
    publish(measured.comparison.cost, measured.details)


# The two counts come last: for a single run of them, `far` measures all that they need.
def test_generate_far_trips(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    trips = {name: far(name).trips for name in ("greedy", "sampled", "padded", "streamed")}
    publish(max(trips.values()), trips)


def test_generate_far_bytes(publish: Callable[..., None], far: Callable[[str], Far]) -> None:
    measured = far("greedy")
    publish(measured.sent + measured.received, measured.details)
