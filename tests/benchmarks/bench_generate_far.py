"""GPT-2 124M generates on a server that is 15 ms away in each direction, against local eager."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from time import perf_counter
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


@attrs.define
class Far:
    """What was measured of one way to generate, in alternating turns."""

    tokens: int
    rival_s: list[float] = attrs.field(factory=list)
    ours_s: list[float] = attrs.field(factory=list)
    counted: list[dict[str, int]] = attrs.field(factory=list)

    @property
    def cost(self) -> float:
        """How many times the time of local eager: the median over turns."""
        return statistics.median(ours / rival for rival, ours in zip(self.rival_s, self.ours_s, strict=True))

    def per_token(self, counter: str) -> float:
        """Return the mean of a counter over turns, for each token."""
        return statistics.mean(counted[counter] for counted in self.counted) / self.tokens

    @property
    def details(self) -> dict[str, float]:
        """Times, waits and traffic."""
        return {"rival (ms)": statistics.median(self.rival_s) * 1e3, "djinn (ms)": statistics.median(self.ours_s) * 1e3,
                "trips a token": self.per_token("round_trips"), "bytes sent a token": self.per_token("bytes_sent"),
                "bytes received a token": self.per_token("bytes_received")}


def measured(local: Any, remote: Any, mode: far_generation.Mode) -> Far:
    """Let local eager and djinn take turns; the first ones do not count."""
    far = Far(mode.tokens)
    for turn in range(WARMUP_TURNS + TURNS):
        begin = perf_counter()
        wanted = far_generation.generated(local, "cpu", mode)
        between = perf_counter()
        djinn.reset_stats()
        made = far_generation.generated(remote, DEVICE, mode)
        end, counted = perf_counter(), djinn.stats()
        assert torch.equal(made, wanted)
        if turn >= WARMUP_TURNS:
            far.rival_s.append(between - begin)
            far.ours_s.append(end - between)
            far.counted.append(counted)
    return far


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
) -> Callable[..., list[Far]]:
    """Measures modes, unless that was done."""

    def measure(*names: str) -> list[Far]:
        missing = [name for name in names if name not in kept]

        def measure_missing() -> None:
            kept.update({name: measured(model, there, far_generation.MODES[name]) for name in missing})

        if missing:
            address, delay = request.getfixturevalue("server_address"), request.getfixturevalue("delay")
            djinn.init(server=delay(address, DELAY_S))
            there = copy.deepcopy(model).to(DEVICE)
        benchmark.pedantic(measure_missing)
        return [kept[name] for name in names]

    return measure


def test_generate_far(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("greedy")
    publish(found.cost, found.details)


def test_generate_far_long(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("long")
    publish(found.cost, found.details)


def test_generate_far_sampled(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("sampled")
    publish(found.cost, found.details)


def test_generate_far_padded(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("padded")
    publish(found.cost, found.details)


def test_generate_far_streamed(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("streamed")
    publish(found.cost, found.details)


def test_generate_far_beams(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("beams")
    publish(found.cost, found.details)


def test_generate_far_trips(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    names = ("greedy", "sampled", "padded", "streamed")
    trips = dict(zip(names, [found.per_token("round_trips") for found in far(*names)], strict=True))
    publish(max(trips.values()), trips)


def test_generate_far_static(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("static")
    publish(found.cost, found.details)


def test_generate_far_static_trips(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("static")
    publish(found.per_token("round_trips"), found.details)


def test_generate_far_bytes(publish: Callable[..., None], far: Callable[..., list[Far]]) -> None:
    [found] = far("greedy")
    publish(found.per_token("bytes_sent") + found.per_token("bytes_received"), found.details)
