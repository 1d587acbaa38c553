"""A GPT-2 that ``torch.compile`` hands to djinn: what a call costs the client, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from support.models import gpt2

import djinn

IDS = torch.arange(1000, 1016)[None]
"""16 tokens."""


Call = Callable[[], torch.Tensor]


def calls(**settings: Any) -> tuple[Call, Call]:
    """Make eager's call and djinn's, and check that they give the same."""
    torch._dynamo.reset()
    djinn.init(**settings)
    model = gpt2.gpt2()
    eager, ours = call_of(model), call_of(torch.compile(model, backend="djinn"))
    for _ in range(2):
        assert torch.equal(eager(), ours())
    return eager, ours


def call_of(function: Any) -> Call:
    return lambda: function(IDS, use_cache=False).logits


def idle_call() -> Call:
    """Make a call whose graph gives what it gave the first time, and does nothing."""
    def idle(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        results: list[Any] = []

        def run(*arguments: Any) -> Any:
            if not results:
                results.append(graph(*arguments))
            return results[0]

        return run

    torch._dynamo.reset()
    made = call_of(torch.compile(gpt2.gpt2(), backend=idle))
    made()
    return made


def test_dynamo(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    turns, costs, idle_costs = 25, [], []

    def timed(call: Call, kept: list[float]) -> None:
        begin = thread_time()
        call()
        kept.append((thread_time() - begin) * 1e3)

    with torch.no_grad():
        eager, ours = calls(server="", device="cpu")
        before = djinn.stats()
        benchmark.pedantic(lambda: timed(ours, costs), rounds=turns)
        after = djinn.stats()
        idle = idle_call()
        for _ in range(turns):
            # As the executor does between djinn's calls, this takes the processor's caches.
            eager()
            timed(idle, idle_costs)
    assert after["round_trips"] - before["round_trips"] == len(costs) == turns
    assert after["operations"] == before["operations"], "something was recorded again"
    publish(statistics.median(costs), {"of that, Dynamo's own (ms)": statistics.median(idle_costs)})


def test_dynamo_call(compare: Callable[..., Any], publish: Callable[..., None], server_address: str) -> None:
    with torch.no_grad():
        eager, ours = calls(server=server_address)
        djinn.reset_stats()
        comparison = compare(eager, ours, turns=9)
        stats = djinn.stats()
    publish(comparison.speed, {**comparison.details, "bytes sent a call": stats["bytes_sent"] / stats["round_trips"]})
