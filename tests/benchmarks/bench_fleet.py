"""Two clients generate on the same two servers: placed by meaning, against in turns."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import attrs
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.clients.tenants import Saturating, Worked
from support.servers.fleet import fleet_of

import djinn

CLIENT = "support.clients.generating"
WORK = ((16, 48), (256, 32))
"""Tokens of the prompt and new ones, for each client: the second has a prompt to read while the first writes."""
TURNS = 7
JOBS, PRODUCTS, SIDE = 20, 10, 192
"""Jobs of a session, products of matrices in each, and rows of the matrices: some 5 ms a job."""
OTHERS_PRODUCTS = 2000
"""Products of small matrices in a program of another client, which has one run after the other."""


@attrs.define
class Client:
    """A process that generates when it is told to."""

    process: subprocess.Popen[str]

    def expect(self) -> list[str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "a client ended"
        return line.split()

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@contextmanager
def clients(servers: str, placement: str) -> Iterator[list[Client]]:
    """Start both, one after the other, so that the second finds the first at work."""
    with ExitStack() as stack:
        started = []
        for prompt_tokens, new_tokens in WORK:
            process = stack.enter_context(subprocess.Popen(
                [sys.executable, "-m", CLIENT, servers, placement, str(prompt_tokens), str(new_tokens)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            started.append(Client(process))
            assert started[-1].expect() == ["ready"]
        yield started


def tokens_per_second(pair: list[Client]) -> tuple[float, float]:
    """Let both generate at the same time; say how fast they were together, and how many bytes moved between servers."""
    begin = perf_counter()
    for client in pair:
        client.begin()
    told = [client.expect() for client in pair]
    took_s = perf_counter() - begin
    return sum(new for _, new in WORK) / took_s, sum(float(moved) for _, moved in told)


def test_two_generations(
    benchmark: BenchmarkFixture, publish: Callable[..., None], start_server: Callable[..., Any]
) -> None:
    servers = ",".join(start_server().address for _ in range(2))
    with clients(servers, "scheduled") as ours, clients(servers, "in_turns") as theirs:
        taken: list[tuple[tuple[float, float], tuple[float, float]]] = []
        benchmark.pedantic(lambda: taken.append((tokens_per_second(ours), tokens_per_second(theirs))), rounds=TURNS)
    publish(statistics.median(mine[0] / other[0] for mine, other in taken), {
        "tokens per second": statistics.median(mine[0] for mine, _ in taken),
        "in turns": statistics.median(other[0] for _, other in taken),
        "MB between servers": statistics.median(mine[1] for mine, _ in taken) / 1e6,
        "MB, in turns": statistics.median(other[1] for _, other in taken) / 1e6,
    })


def test_busy_server(
    compare: Callable[..., Any], publish: Callable[..., None], start_server: Callable[..., Any]
) -> None:
    """Jobs that need nothing of each other, while another client keeps the server busy that they would use first."""
    servers = [start_server() for _ in range(2)]
    session = djinn.init(servers=[server.address for server in servers], placement="automatic", recovery="none")
    loads, numbers = fleet_of(session)._loads, itertools.count(0.5, 1e-4)

    def jobs(*, reads_loads: bool) -> None:
        loads._are_read = reads_loads
        if not reads_loads:
            loads._loads = [0.0, 0.0]
        for _ in range(JOBS):
            matrix = torch.full((SIDE, SIDE), next(numbers), device=session.device)
            made = matrix
            for _ in range(PRODUCTS):
                made = made @ matrix
            made.sum().item()

    with Saturating(Worked(servers[0].address, "", OTHERS_PRODUCTS)):
        comparison = compare(lambda: jobs(reads_loads=False), lambda: jobs(reads_loads=True), turns=TURNS)
    publish(comparison.speed, comparison.details)
