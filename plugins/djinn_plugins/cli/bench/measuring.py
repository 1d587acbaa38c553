"""Measures the current session."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch

import djinn
from djinn_plugins.cli.bench.gpt import GptShape, SmallGpt, generate
from djinn_plugins.cli.bench.report import BenchReport, Comparison, Latency, Throughput

__all__ = ("measure",)

DEVICE = "remote_accelerator:0"
SIZES_BYTES = (2**16, 2**20, 2**24, 2**26)
MAX_SAMPLES = 1000
OPERATIONS = 500
"""Operations between two flushes."""
CHECKED_TOKENS = 8
WARM_UP = 3
"""Round trips before those that count: the first imports the inference of shapes."""


def measure(seconds: float, say: Callable[[str], object]) -> BenchReport:
    """Measure everything.

    Args:
        seconds: Time for all measurements; each is made at least once.
        say: Is given the name of each measurement that begins.
    """
    state = djinn.get_runtime_state()
    say("latency")
    latency = _latency(0.1 * seconds)
    say("throughput")
    throughput = tuple(_throughput(size_bytes, 0.4 * seconds / len(SIZES_BYTES)) for size_bytes in SIZES_BYTES)
    say("operations per second")
    operations = Comparison(_operations(torch.device(DEVICE), 0.1 * seconds),
                            _operations(torch.device("cpu"), 0.1 * seconds))
    say("tokens per second of a small GPT")
    tokens, same = _tokens(0.15 * seconds)
    return BenchReport(str(state.address), str(state.device), latency, throughput, operations, tokens, same)


def _latency(seconds: float) -> Latency:
    one = torch.ones((), device=DEVICE)
    for number in range(WARM_UP):
        (one + number).item()
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < MAX_SAMPLES and (not samples or time.perf_counter() < until):
        begun = time.perf_counter()
        (one + len(samples)).item()
        samples.append(time.perf_counter() - begun)
    ordered = sorted(samples)
    return Latency(len(samples), statistics.median(samples), ordered[int(0.9 * (len(ordered) - 1))], tuple(samples))


def _throughput(size_bytes: int, seconds: float) -> Throughput:
    up_s: list[float] = []
    down_s: list[float] = []
    until = time.perf_counter() + seconds
    while not up_s or time.perf_counter() < until:
        # New content each time: a server may keep uploads, and then the same one is not sent again.
        data = torch.rand(size_bytes // 4)
        begun = time.perf_counter()
        there = data.to(DEVICE)
        djinn.synchronize()
        up_s.append(time.perf_counter() - begun)
        # A result, because the content of an upload is known here.
        result = there + 1
        djinn.synchronize()
        begun = time.perf_counter()
        result.cpu()
        down_s.append(time.perf_counter() - begun)
    return Throughput(size_bytes, size_bytes / statistics.median(up_s), size_bytes / statistics.median(down_s))


def _operations(device: torch.device, seconds: float) -> float:
    value = torch.ones(16, device=device)
    spent_s, count = 0.0, 0
    with torch.no_grad():
        while spent_s < seconds:
            begun = time.perf_counter()
            result = value
            for _ in range(OPERATIONS):
                result = result + 1
            spent_s += time.perf_counter() - begun
            count += OPERATIONS
            result.sum().item()
    return count / spent_s


def _tokens(seconds: float) -> tuple[Comparison, bool]:
    shape = GptShape()
    torch.manual_seed(0)
    local = SmallGpt(shape).eval()
    remote = copy.deepcopy(local).to(DEVICE)
    window = torch.arange(shape.context)[None] % shape.vocabulary
    # The first tokens are not timed: operations and programs are new then.
    same = generate(local, window, CHECKED_TOKENS) == generate(remote, window.to(DEVICE), CHECKED_TOKENS)
    return Comparison(_rate(remote, window.to(DEVICE), seconds), _rate(local, window, seconds)), same


def _rate(model: SmallGpt, window: torch.Tensor, seconds: float) -> float:
    count, begun = 0, time.perf_counter()
    while not count or time.perf_counter() - begun < seconds:
        count += len(generate(model, window, CHECKED_TOKENS))
    return count / (time.perf_counter() - begun)
