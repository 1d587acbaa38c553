"""The tables that earlier documents of djinn left blank, and their headline figures.

Times are processor times, which on an idle machine are the times that one thread takes, and on a busy one nearly so; of
several turns the fastest counts, and sides take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeAlias

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.clients import held
from support.models import gpt2
from torch import nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

import djinn

DEVICE = "remote_accelerator:0"
NETWORK_S = 0.0005
"""One way, between two machines of one data centre, for questions about metadata."""
QUESTIONS = 10_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what processes take and hold")
Fill: TypeAlias = Callable[..., None]
Work: TypeAlias = Callable[[], object]


@pytest.fixture
def fill(benchmark: BenchmarkFixture) -> Fill:
    """Fills a row of a table."""

    def filled(table: str, row: str, **cells: float | str) -> None:
        benchmark.extra_info.setdefault("documents", []).append({"table": table, "row": row, "cells": cells})
        print(f"\n{table}: {row}: {cells}")

    return filled


def fastest(
    benchmark: BenchmarkFixture, works: Mapping[str, Work], *, turns: int, calls: int = 1,
    settle: Callable[[], object] = bool, clock: Callable[[], float] = process_time,
) -> dict[str, float]:
    """Let works take turns, some calls each; return the seconds of a call in the fastest turn of each."""
    best = dict.fromkeys(works, float("inf"))

    def turn() -> None:
        for name, work in works.items():
            begin = clock()
            kept = [work() for _ in range(calls)]
            best[name] = min(best[name], (clock() - begin) / calls)
            del kept
            settle()

    with torch.no_grad():
        benchmark.pedantic(turn, rounds=turns, warmup_rounds=1)
    return best


def with_server(server: Any) -> Callable[[], float]:
    """Return a clock of the processor time of this process and of a server's worker."""
    threads = Path(f"/proc/{server.pid}/task")

    def now() -> float:
        running = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads.iterdir())
        return process_time() + running * 1e-9

    return now


def resnet50() -> ResNetModel:
    torch.manual_seed(0)
    return ResNetModel(ResNetConfig()).eval()


def linear() -> nn.Module:
    return nn.Linear(512, 512)


def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig()).eval()


IDS = torch.arange(16)[None]
PICTURE = torch.linspace(-1, 1, 3 * 224 * 224).view(1, 3, 224, 224)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "Linear": (linear, torch.ones(8, 512)), "ResNet-50": (resnet50, PICTURE), "GPT-2": (gpt2.gpt2, IDS),
    "BERT-Base": (bert, IDS)}


def single_operations(device: str) -> dict[str, Work]:
    x, y = (torch.ones(1000, 1000).to(device) for _ in range(2))
    return {"`torch.randn(1000, 1000)`": lambda: torch.randn(1000, 1000, device=device), "`x @ y`": lambda: x @ y,
            "`x.sum()`": x.sum}


def forwards(name: str, device: str) -> Work:
    make, given = MODELS[name]
    model, operand = make().to(device), given.to(device)
    return lambda: model(operand)


def row_of_overhead(
    benchmark: BenchmarkFixture, fill: Fill, server: Any, row: str, here: Work, there: Work, calls: int
) -> None:
    """Compare eager with recording, and with recording and running."""

    def and_run() -> object:
        result = there()
        djinn.synchronize()
        return result

    taken = fastest(benchmark, {"eager": here, "recorded": there, "run": and_run}, turns=6, calls=calls,
                    settle=djinn.synchronize, clock=with_server(server))
    eager_s = taken["eager"]
    fill("overhead", row, **{
        "eager": eager_s * 1e6, "recorded": taken["recorded"] * 1e6, "of eager": 100 * taken["recorded"] / eager_s,
        "run": taken["run"] * 1e6, "more": 100 * (taken["run"] / eager_s - 1)})


@linux
@pytest.mark.parametrize("row", ["`torch.randn(1000, 1000)`", "`x @ y`", "`x.sum()`"])
def test_documents_operations(benchmark: BenchmarkFixture, fill: Fill, server: Any, row: str) -> None:
    djinn.init(server=server.address, flush_every=None)
    here, there = single_operations("cpu"), single_operations(DEVICE)
    row_of_overhead(benchmark, fill, server, row, here[row], there[row], calls=5)


@linux
@pytest.mark.parametrize("name", ["ResNet-50", "GPT-2"])
def test_documents_models(benchmark: BenchmarkFixture, fill: Fill, server: Any, name: str) -> None:
    djinn.init(server=server.address, flush_every=None)
    row_of_overhead(benchmark, fill, server, f"{name} forward", forwards(name, "cpu"), forwards(name, DEVICE), calls=1)


@linux
def test_documents_memory(benchmark: BenchmarkFixture, fill: Fill, server_address: str) -> None:
    def work() -> list[tuple[str, float, int]]:
        done = subprocess.run([sys.executable, "-m", held.__name__, server_address], check=True, capture_output=True,
                              text=True)
        return json.loads(done.stdout)

    for row, size, nodes in benchmark.pedantic(work, rounds=1):
        fill("memory", row, megabytes=size / 2**20 / (held.FORWARDS if nodes else 1),
             node=size / nodes if nodes else "")


@pytest.mark.parametrize("name", MODELS)
def test_documents_graphs(benchmark: BenchmarkFixture, fill: Fill, server_address: str, name: str) -> None:
    djinn.init(server=server_address, flush_every=None)
    make, given = MODELS[name]
    model, there, operand = make(), make().to(DEVICE), given.to(DEVICE)
    nodes: dict[str, int] = {}

    def traced() -> None:
        graph = djinn.build_graph(model, given)
        assert graph.backend_type == "fx"
        nodes["traced"] = len(graph.nodes())

    def recorded() -> None:
        with djinn.capture(there) as captured:
            there(operand)
        nodes["recorded"] = len(captured.graph.nodes())

    taken = fastest(benchmark, {"traced": traced, "recorded": recorded}, turns=3, settle=djinn.synchronize)
    fill("graphs", name, **{"nodes traced": nodes["traced"], "traced": taken["traced"] * 1e3,
                            "nodes recorded": nodes["recorded"], "recorded": taken["recorded"] * 1e3})


def test_documents_capture(benchmark: BenchmarkFixture, fill: Fill, server_address: str) -> None:
    djinn.init(server=server_address, flush_every=None)
    x, y = torch.ones(64, 64).to(DEVICE), torch.ones(64, 64).to(DEVICE)
    forward = forwards("GPT-2", DEVICE)
    forward()
    djinn.synchronize()
    djinn.reset_stats()
    forward()
    djinn.synchronize()
    operations = djinn.stats()["operations"]
    added = fastest(benchmark, {"add": lambda: x + y}, turns=12, calls=200, settle=djinn.synchronize)["add"]
    kept = float("inf")
    for _ in range(5):
        begin = process_time()
        with torch.no_grad():
            forward()
        kept = min(kept, process_time() - begin)
        djinn.synchronize()
    fill("headlines", "recording an operation", documents="< 5 µs",
         measured=f"{added * 1e6:.2g} µs for `x + y`; {kept / operations * 1e6:.3g} µs an operation of a forward of "
                  "GPT-2, with the model's own Python")


def test_documents_known_graphs(benchmark: BenchmarkFixture, fill: Fill, server_address: str) -> None:
    djinn.init(server=server_address, flush_every=None)
    forward = forwards("GPT-2", DEVICE)
    djinn.synchronize()
    first: dict[str, float] = {}

    def handed_over() -> None:
        """Wait until it has left the client, not until it has run."""
        forward()
        djinn.flush()

    with torch.no_grad():
        djinn.reset_stats()
        begin = process_time()
        handed_over()
        first["seconds"], first["bytes"] = process_time() - begin, djinn.stats()["bytes_sent"]
        djinn.synchronize()
        handed_over()
        djinn.synchronize()
        djinn.reset_stats()
        handed_over()
        sent = djinn.stats()["bytes_sent"]
        djinn.synchronize()
    later_s = fastest(benchmark, {"later": handed_over}, turns=5, settle=djinn.synchronize)["later"]
    fill("headlines", "a graph that is known", documents="450 ms, then 2 ms: 225 x",
         measured=f"a forward of GPT-2 is recorded and sent in {first['seconds'] * 1e3:.3g} ms and "
                  f"{first['bytes']:,.0f} bytes; later in {later_s * 1e3:.2g} ms and {sent:,} bytes: "
                  f"{first['seconds'] / later_s:.2g} x and {first['bytes'] / sent:.3g} x")


def test_documents_compiled(benchmark: BenchmarkFixture, fill: Fill, server_address: str) -> None:
    torch._dynamo.reset()
    djinn.init(server=server_address)
    model, given = gpt2.gpt2().to(DEVICE), IDS.to(DEVICE)
    compiled = torch.compile(model, backend="djinn")
    with torch.no_grad():
        begin = process_time()
        compiled(given)
        djinn.flush()
        first_s = process_time() - begin
        djinn.synchronize()
    later_s = fastest(benchmark, {"later": lambda: compiled(given)}, turns=6, settle=djinn.synchronize)["later"]
    fill("headlines", "a compiled graph that is known", documents="450 ms, then 2 ms: 225 x",
         measured=f"`torch.compile` of GPT-2 takes {first_s * 1e3:,.0f} ms at the first call; a later call takes the "
                  f"client {later_s * 1e3:.2g} ms: {first_s / later_s:,.0f} x")


def test_documents_metadata(
    benchmark: BenchmarkFixture, fill: Fill, server_address: str, delay: Callable[[str, float], str]
) -> None:
    djinn.init(server=delay(server_address, NETWORK_S), flush_every=None)
    x = torch.ones(64, 64, device=DEVICE)
    pending = x @ x
    trips = djinn.stats()["round_trips"]

    def asked() -> object:
        return pending.shape, pending.dtype, pending.device

    local_s = fastest(benchmark, {"asked": asked}, turns=10, calls=2_000)["asked"]
    assert djinn.stats()["round_trips"] == trips
    djinn.synchronize()
    remote_s = float("inf")
    for _ in range(100):
        begin = perf_counter()
        djinn.synchronize()
        remote_s = min(remote_s, perf_counter() - begin)
    fill("headlines", "metadata without a question to the server", documents="1,923 x",
         measured=f"shape, dtype and device of a pending tensor take {local_s * 1e6:.2g} µs; a round trip through a "
                  f"proxy that adds 0.5 ms each way {remote_s * 1e3:.2g} ms: {remote_s / local_s:,.0f} x")


def test_documents_questions(benchmark: BenchmarkFixture, fill: Fill, server_address: str) -> None:
    djinn.init(server=server_address, result_cache_bytes=10**8)
    mask = torch.ones(1, 64, dtype=torch.int64).to(DEVICE)
    scores = torch.rand(1, 512, 512, device=DEVICE)
    djinn.synchronize()

    def ask(question: Callable[[], object]) -> Mapping[str, Any]:
        djinn.reset_stats()
        for _ in range(QUESTIONS):
            question()
        return djinn.stats()

    told = benchmark.pedantic(lambda: [ask(lambda: bool((mask == 1).all())),
                                       ask(lambda: (scores > 0.5).all().cpu())], rounds=1)
    known, reused = told
    fill("headlines", "control checks that are repeated", documents="1,000,000 checks, 100 executions: 10,000 x",
         measured=f"{QUESTIONS:,} times `if (mask == 1).all()` of an uploaded mask: {known['round_trips']} round "
                  f"trips, nothing runs; of a computed tensor, with `result_cache_bytes`: "
                  f"{QUESTIONS - reused['results_reused']:,.0f} execution")


def test_documents_argmax(benchmark: BenchmarkFixture, fill: Fill, server_address: str) -> None:
    djinn.init(server=server_address)
    logits = torch.zeros(1, 1024, 50257, device=DEVICE)
    djinn.synchronize()

    def work() -> int:
        djinn.reset_stats()
        logits.argmax(-1).cpu()
        return int(djinn.stats()["bytes_received"])

    received = benchmark.pedantic(work, rounds=1, warmup_rounds=1)
    whole = logits.numel() * 4
    fill("headlines", "bytes of an argmax of GPT-2's logits", documents="196 MB, then 8 KB: 25,000 x",
         measured=f"{whole / 2**20:.0f} MB, then {received:,} bytes, with the frames: {whole / received:,.0f} x")
