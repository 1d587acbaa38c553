"""How far off predictions are after a calibration, and how long scheduling takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.planning import graphs, predictions

import djinn
from djinn_plugins.schedule.latency.scheduler import LatencyScheduler
from djinn_plugins.schedule.schedule import DeviceInfo, LinkProfile

PROGRAMS: dict[str, Callable[[], Callable[[], Any]]] = {
    "GPT-2 forward": lambda: predictions.gpt2_work()[0],
    "GPT-2 decode": lambda: predictions.gpt2_work()[1],
    "ResNet-18": predictions.resnet_work,
    "training step": predictions.training_work,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what was measured of this machine before alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def predict_all(benchmark: BenchmarkFixture, publish: Callable[..., None], address: str | None) -> None:
    djinn.init(address)
    taken_s = djinn.calibrate().seconds
    found = {name: predictions.predict(make()) for name, make in PROGRAMS.items()}
    benchmark.pedantic(lambda: None)
    details = {f"{name} {what} (ms)": seconds * 1e3 for name, made in found.items()
               for what, seconds in (("predicted", made.predicted_s), ("measured", made.median_s))}
    publish(max(made.error for made in found.values()), {**details, "calibrating (s)": taken_s})


def test_prediction(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    assert torch.get_num_threads() == 1
    predict_all(benchmark, publish, None)


def test_prediction_tcp(benchmark: BenchmarkFixture, publish: Callable[..., None], server_address: str) -> None:
    predict_all(benchmark, publish, server_address)


def schedule_layered(nodes: int, width: int, devices: int, rounds: int, benchmark: BenchmarkFixture) -> float:
    """Schedule a layered graph; return the fewest seconds that it took."""
    names = [f"d{index}" for index in range(devices)]
    given = [DeviceInfo(name, links={other: LinkProfile(2e-5, 1e10) for other in names if other != name})
             for name in names]
    graph, scheduler = graphs.layered(random.Random(1), nodes, width), LatencyScheduler()
    graph.edges()
    benchmark.pedantic(lambda: scheduler.schedule(graph, given), rounds=rounds)
    return float(benchmark.stats.stats.min)


def test_schedule_541(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    publish(schedule_layered(541, 12, 3, 20, benchmark) * 1e3)


def test_schedule_100000(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    publish(schedule_layered(100_000, 200, 100, 1, benchmark))
