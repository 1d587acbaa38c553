"""Benchmarks measure ratios: rival and djinn take turns in one run, and the median of the ratios counts."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import perf_counter

import attrs
import pytest
import torch


@attrs.frozen
class Comparison:
    """Times of turns taken alternately, in seconds."""

    rival_s: list[float]
    ours_s: list[float]

    @property
    def speed(self) -> float:
        """How many times as fast as the rival: the median over turns."""
        return statistics.median(r / o for r, o in zip(self.rival_s, self.ours_s, strict=True))

    def __str__(self) -> str:
        return (f"{self.speed:.2f}x as fast (rival {statistics.median(self.rival_s) * 1e3:.1f} ms, "
                f"djinn {statistics.median(self.ours_s) * 1e3:.1f} ms, {len(self.ours_s)} turns)")


def _compare(rival: Callable[[], object], ours: Callable[[], object], turns: int = 5) -> Comparison:
    """Let the two take turns, after one that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for work, taken in zip((rival, ours), times, strict=True):
            begin = perf_counter()
            work()
            if turn:
                taken.append(perf_counter() - begin)
    return Comparison(*times)


@pytest.fixture
def compare() -> Callable[..., Comparison]:
    """Measures a rival and djinn in turns."""
    return _compare


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Give every side one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def server_address() -> Iterator[str]:
    """A server in another process, with one thread."""
    program = "from djinn.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", program, "serve", "--threads", "1"],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.terminate()
    process.wait(timeout=20)
    process.stdout.close()
