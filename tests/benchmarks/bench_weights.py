"""Weights: what moving 500 MB costs the client's memory, and what sending them again costs the network."""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.clients import first_token, weights
from support.models import gpt2

import djinn

LAYERS = 125
Measure = Callable[..., dict[str, Any]]
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")


@pytest.fixture
def moved(benchmark: BenchmarkFixture, server_address: str) -> Measure:
    """Moves 500 MB in a process of its own, and tells what that process tells."""

    def run(move: str, path: Path | str = "") -> dict[str, Any]:
        command = [sys.executable, "-m", weights.__name__, server_address, move, str(LAYERS), str(path)]

        def work() -> dict[str, Any]:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            return json.loads(done.stdout)

        return benchmark.pedantic(work, rounds=1)

    return run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """500 MB in a file."""
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file(weights.build(LAYERS).state_dict(), path)
    return path


def details(found: dict[str, Any]) -> dict[str, float]:
    return {"sent (MB)": found["stats"]["bytes_sent"] / 2**20, "held afterwards (MB)": found["after"]}


@linux
def test_weights_made(moved: Measure, publish: Callable[..., None]) -> None:
    found = moved("construct")
    publish(max(1.0, found["peak"]), details(found))


@linux
def test_weights_moved(moved: Measure, publish: Callable[..., None]) -> None:
    found = moved("to_device")
    publish(max(1.0, found["peak"]), details(found))


@linux
def test_weights_loaded(moved: Measure, publish: Callable[..., None], saved: Path) -> None:
    found = moved("load_file", saved)
    publish(max(1.0, found["anonymous"]), details(found))


@linux
def test_weights_loaded_singly(moved: Measure, publish: Callable[..., None], saved: Path) -> None:
    found = moved("safe_open", saved)
    publish(max(1.0, found["anonymous"]), details(found))


def test_first_token(
    benchmark: BenchmarkFixture, start_server: Callable[..., Any], publish: Callable[..., None], tmp_path: Path
) -> None:
    folders = stored, own = tmp_path / "models" / "gpt2", tmp_path / "client" / "gpt2"
    for folder, model in zip(folders, (gpt2.gpt2(), gpt2.gpt2().config), strict=True):
        model.save_pretrained(folder)
    address = start_server("--models", str(stored.parent)).address
    taken: dict[str, list[dict[str, float]]] = {"rival": [], "djinn": []}

    def turn() -> None:
        for side, given in (("rival", [stored]), ("djinn", [own, address])):
            command = [sys.executable, "-m", first_token.__name__, *map(str, given)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            taken[side].append(json.loads(done.stdout))

    benchmark.pedantic(turn, rounds=5, warmup_rounds=1)
    rival, ours = (pairs[1:] for pairs in taken.values())
    assert {each["is"] for each in rival} == {each["is"] for each in ours}
    parts = {f"{part} (ms)": statistics.median(each[part] for each in ours) * 1e3
             for part in ("init", "load", "token", "import")}
    publish(statistics.median(our["total"] / their["total"] for our, their in zip(ours, rival, strict=True)),
            {"rival (ms)": statistics.median(each["total"] for each in rival) * 1e3,
             "djinn (ms)": statistics.median(each["total"] for each in ours) * 1e3, **parts})


def test_weights_sent_again(compare: Callable[..., Any], publish: Callable[..., None], server_address: str) -> None:
    torch.manual_seed(0)
    model = weights.build(32)

    def move(owner: str) -> int:
        djinn.init(server=server_address, owner=owner)
        remote = copy.deepcopy(model)
        djinn.reset_stats()
        remote.to("remote_accelerator:0")
        djinn.synchronize()
        return djinn.stats()["bytes_sent"]

    first = move("bench")
    comparison = compare(lambda: move(""), lambda: move("bench"), turns=3)
    publish(move("bench") / first, comparison.details)
