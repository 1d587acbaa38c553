"""A small GPT is trained on a server in another process, against local eager."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture
from support.models.small_gpt import Training

import djinn

DEVICE = "remote_accelerator:0"
DELAY_S = 0.015
STEPS = 20


def test_training(compare: Callable[..., Any], publish: Callable[..., None], server_address: str) -> None:
    djinn.init(server=server_address)
    ours, rival = Training(DEVICE), Training("cpu")
    read: tuple[list[float], list[float]] = ([], [])
    comparison = compare(lambda: read[0].extend(rival.steps(STEPS)), lambda: read[1].extend(ours.steps(STEPS)))
    assert read[0] == read[1]
    assert read[0][-1] < read[0][0]
    djinn.reset_stats()
    ours.steps(STEPS)
    publish(comparison.speed, comparison.details | {
        f"{name} a step": djinn.stats()[name] / STEPS
        for name in ("operations", "flushes", "bytes_sent", "round_trips", "programs_sent")})


def test_training_delayed(
    benchmark: BenchmarkFixture, publish: Callable[..., None], server_address: str, delay: Callable[[str, float], str]
) -> None:
    far_address = delay(server_address, DELAY_S)
    read: list[list[float]] = []

    def seconds(address: str) -> float:
        djinn.init(server=address)
        training = Training(DEVICE)
        # Two readings of the loss: the timed part begins when everything before it has run.
        training.steps(STEPS // 2)
        begin = perf_counter()
        read.append(training.steps(STEPS))
        return perf_counter() - begin

    near: list[float] = []
    far: list[float] = []
    benchmark.pedantic(lambda: far.append(seconds(far_address)), setup=lambda: near.append(seconds(server_address)),
                       rounds=3)
    assert all(losses == read[0] for losses in read)
    publish(statistics.median(there / here for here, there in zip(near, far, strict=True)),
            {"without (ms)": statistics.median(near) * 1e3, "with delay (ms)": statistics.median(far) * 1e3})
