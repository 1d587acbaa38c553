"""How far off predictions are after a calibration: of programs on an executor in this process, and on a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import predicting
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import djinn

PROGRAMS: dict[str, Callable[[], Callable[[], Any]]] = {
    "GPT-2 forward": lambda: predicting.gpt2_work()[0],
    "GPT-2 decode": lambda: predicting.gpt2_work()[1],
    "ResNet-18": predicting.resnet_work,
    "training step": predicting.training_work,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what was measured of this machine before alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def predict_all(benchmark: BenchmarkFixture, publish: Callable[..., None], address: str | None) -> None:
    djinn.init(address)
    taken_s = djinn.calibrate().seconds
    found = {name: predicting.predict(make()) for name, make in PROGRAMS.items()}
    benchmark.pedantic(lambda: None)
    details = {f"{name} {what} (ms)": seconds * 1e3 for name, made in found.items()
               for what, seconds in (("predicted", made.predicted_s), ("measured", made.median_s))}
    publish(max(made.error for made in found.values()), {**details, "calibrating (s)": taken_s})


def test_prediction(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    assert torch.get_num_threads() == 1
    predict_all(benchmark, publish, None)


def test_prediction_tcp(benchmark: BenchmarkFixture, publish: Callable[..., None], server_address: str) -> None:
    predict_all(benchmark, publish, server_address)
