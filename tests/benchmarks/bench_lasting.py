"""Nothing grows while a long text is generated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

TOKENS, EVERY, WARMUP = 3_000, 100, 300
SCRIPT = "support.clients.long_text"


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    """The one run that both figures are taken of."""
    return []


@pytest.fixture
def observed(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest, kept: list[dict[str, Any]]
) -> dict[str, Any]:
    """What was seen of a client in a fresh process, and of its server."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident sets are read from /proc, which this system has not")
    if kept:
        benchmark.pedantic(lambda: None)
        return kept[0]
    server = request.getfixturevalue("server")
    command = [sys.executable, "-m", SCRIPT, server.address, str(server.pid), str(TOKENS), str(EVERY)]
    done = benchmark.pedantic(lambda: subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True))
    kept.append(json.loads(done.stdout.splitlines()[-1]))
    return kept[0]


def growth(samples: list[int]) -> float:
    return max(samples[WARMUP // EVERY:]) / samples[WARMUP // EVERY - 1]


def test_lasting_memory(publish: Callable[..., None], observed: dict[str, Any]) -> None:
    client, server = ([sample[side] for sample in observed["samples"]] for side in (0, 1))
    publish(max(growth(client), growth(server)), {
        "client": growth(client), "server": growth(server), "client in the end (MB)": client[-1] / 1e6,
        "server in the end (MB)": server[-1] / 1e6, "calls whose metadata was new": observed["plans"],
        "values sent early": observed["early"]})


def test_lasting_handles(publish: Callable[..., None], observed: dict[str, Any]) -> None:
    handles = [sample[2] for sample in observed["samples"]]
    publish(growth(handles), {"values in the end": handles[-1]})
