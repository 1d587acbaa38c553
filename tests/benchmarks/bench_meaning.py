"""What it costs to find out what a graph means."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.models import gpt2

import djinn
from djinn_plugins.graph.graph import RecordedGraph

DEVICE = "remote_accelerator:0"
TURNS = 7


def recorded(tokens: int, **config: int) -> RecordedGraph:
    """Record a forward pass of GPT-2."""
    djinn.init(device="cpu", flush_every=None)
    with torch.device(DEVICE):
        model = gpt2.gpt2(**config)
    with torch.no_grad(), djinn.capture(model) as captured:
        model(torch.arange(tokens, device=DEVICE)[None] % model.config.vocab_size)
    return captured.graph


def narrow(nodes: int) -> RecordedGraph:
    """Record a narrow GPT-2 of as many layers as give so many nodes."""
    layers = nodes // 37
    return recorded(16, n_layer=layers, n_embd=32, n_head=4, vocab_size=128, n_positions=64)


def a_turn_s(graph: RecordedGraph) -> float:
    """Annotate once, as for somebody who looks first: what graphs and patterns keep belongs to a graph."""
    fresh = RecordedGraph(graph.nodes(), graph.storages, graph.backend_type, graph.values)
    gc.collect()
    begin = perf_counter()
    annotated = djinn.annotate_graph(fresh)
    taken = perf_counter() - begin
    assert len(annotated.nodes) == len(graph.nodes())
    return taken


def test_annotate_gpt2(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    graph, taken = recorded(16), list[float]()
    benchmark.pedantic(lambda: taken.append(a_turn_s(graph)), rounds=TURNS, warmup_rounds=2)
    assert djinn.annotate_graph(graph).profile.patterns["attention"] == 12
    publish(statistics.median(taken[-TURNS:]) * 1e3, {"nodes": len(graph.nodes())})


def test_annotate_10000(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    graph, taken = narrow(10_100), list[float]()
    assert len(graph.nodes()) >= 10_000
    benchmark.pedantic(lambda: taken.append(a_turn_s(graph)), rounds=TURNS, warmup_rounds=1)
    publish(statistics.median(taken[-TURNS:]), {"nodes": len(graph.nodes())})


def test_annotate_growth(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    graphs = {"1,000": narrow(1_010), "10,000": narrow(10_100)}
    taken: dict[str, list[float]] = {name: [] for name in graphs}

    def turn() -> None:
        for name, graph in graphs.items():
            taken[name].append(a_turn_s(graph) / len(graph.nodes()) * 1e6)

    benchmark.pedantic(turn, rounds=TURNS, warmup_rounds=1)
    ratio = statistics.median(many / few for few, many in zip(
        taken["1,000"][-TURNS:], taken["10,000"][-TURNS:], strict=True))
    publish(ratio, {f"a node of {name} (us)": statistics.median(times[-TURNS:]) for name, times in taken.items()})
