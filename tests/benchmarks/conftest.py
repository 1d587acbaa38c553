"""Benchmarks measure ratios: rival and djinn take turns in one run, and the median of the ratios counts."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter

import attrs
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.network import delaying_proxy
from support.reports import performance
from support.servers.serving import workers_of

import djinn


@attrs.frozen
class Comparison:
    """Times of turns taken alternately, in seconds."""

    rival_s: list[float]
    ours_s: list[float]

    @property
    def speed(self) -> float:
        """How many times as fast as the rival: the median over turns."""
        return statistics.median(r / o for r, o in zip(self.rival_s, self.ours_s, strict=True))

    @property
    def cost(self) -> float:
        """How many times the rival's time: the median over turns."""
        return statistics.median(o / r for r, o in zip(self.rival_s, self.ours_s, strict=True))

    @property
    def details(self) -> dict[str, float]:
        """Medians, in milliseconds."""
        return {"rival (ms)": statistics.median(self.rival_s) * 1e3, "djinn (ms)": statistics.median(self.ours_s) * 1e3}

    def __str__(self) -> str:
        return (f"{self.speed:.2f}x as fast (rival {statistics.median(self.rival_s) * 1e3:.1f} ms, "
                f"djinn {statistics.median(self.ours_s) * 1e3:.1f} ms, {len(self.ours_s)} turns)")


@pytest.fixture
def compare(benchmark: BenchmarkFixture) -> Callable[..., Comparison]:
    """Lets a rival and djinn take turns, after some that do not count. pytest-benchmark times djinn's."""

    def comparison(
        rival: Callable[[], object], ours: Callable[[], object], turns: int = 5, warmup_turns: int = 1
    ) -> Comparison:
        taken: tuple[list[float], list[float]] = ([], [])

        def timed(work: Callable[[], object], kept: list[float]) -> None:
            begin = perf_counter()
            work()
            kept.append(perf_counter() - begin)

        benchmark.pedantic(lambda: timed(ours, taken[1]), setup=lambda: timed(rival, taken[0]), rounds=turns,
                           warmup_rounds=warmup_turns)
        return Comparison(*(times[-turns:] for times in taken))

    return comparison


@pytest.fixture
def publish(benchmark: BenchmarkFixture) -> Callable[..., None]:
    """Gives a benchmark's figure to the published table, where specs/performance.toml describes it."""

    def published(ratio: float, details: Mapping[str, float] | None = None) -> None:
        described = performance.load_spec().measures[performance.identity(benchmark.name)]
        benchmark.extra_info.update(measure=described.measure, ratio=ratio, bar=described.bar, better=described.better,
                                    details=dict(details or {}))
        print(f"\n{benchmark.name}: {ratio:.4g} {described.unit} (bar {described.bar:g}) {dict(details or {})}")

    return published


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Give every side one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(performance.THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    """Leave no session to the next benchmark."""
    yield
    djinn.shutdown()


@attrs.frozen
class ServerProcess:
    """A server in another process, with one thread."""

    address: str
    pid: int
    """Of its worker, which runs the operations; of the gateway, where the system does not tell."""


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers of the benchmark's own."""
    program = "from djinn_plugins.cli.app import main; main()"
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> ServerProcess:
        command = [sys.executable, "-c", program, "serve", "--device", "cpu", "--threads", str(performance.THREADS),
                   # Sessions whose clients or proxies ended without a goodbye are not waited for.
                   "--drain-s", "0",
                   *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        started.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        workers = workers_of(process.pid) if Path(f"/proc/{process.pid}").exists() else []
        return ServerProcess(address, workers[0] if workers else process.pid)

    yield start
    # A server that is told to stop waits for its sessions.
    djinn.shutdown()
    for process in started:
        process.terminate()
        process.wait(timeout=20)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A server of the benchmark's own."""
    return start_server()


@pytest.fixture
def server_address(server: ServerProcess) -> str:
    """Address of a server in another process."""
    return server.address


@pytest.fixture
def delay() -> Iterator[Callable[[str, float], str]]:
    """Puts a distance before a server: ``delay(address, seconds each way)`` is its address from there."""
    started: list[subprocess.Popen[str]] = []

    def start(address: str, delay_s: float) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", delaying_proxy.__name__, address.removeprefix("tcp://"), str(delay_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return f"tcp://{process.stdout.readline().strip()}"

    yield start
    for process in started:
        process.communicate(timeout=20)
