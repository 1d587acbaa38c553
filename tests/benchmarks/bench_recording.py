"""What recording costs: single operators, a model, and very many pending operations."""

from __future__ import annotations

import copy
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
import torch._lazy
import torch._lazy.ts_backend
from pytest_benchmark.fixture import BenchmarkFixture
from support.models import gpt2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import djinn

DEVICE = "remote_accelerator:0"
CALLS, TURNS, WARMUP_CALLS = 200, 25, 50


class Empty(torch.Tensor):
    """Python's floor: a function override that does nothing but make the wrapper of a result."""

    __torch_dispatch__: Any = classmethod(lambda cls, *_: NotImplemented)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return empty(torch.Size((64, 64)))


def empty(size: torch.Size) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(Empty, size, dtype=torch.float32)
    return made


def operators(
    device: str, wrap: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    x, y, w, b = (wrap(torch.randn(size).to(device)) for size in ((64, 64), (64, 64), (64, 64), (64,)))
    return {
        "add": lambda: x + y,
        "mm": lambda: torch.mm(x, y),
        "layer_norm": lambda: functional.layer_norm(x, (64,), b, b),
        "linear": lambda: functional.linear(x, w, b),
        "view": lambda: x.view(4096),
        "cat": lambda: torch.cat([x, y], -1),
        "softmax": lambda: torch.softmax(x, -1),
        "mul": lambda: x * 0.5,
    }


def a_call_us(call: Callable[[], torch.Tensor], settle: Callable[[], object], calls: int = CALLS) -> float:
    """Time calls whose results are kept, after some that do not count; untimed, let the side do what it has put off."""
    kept = [call() for _ in range(WARMUP_CALLS)]
    begin = perf_counter()
    kept += [call() for _ in range(calls)]
    taken = perf_counter() - begin
    settle()
    return taken / calls * 1e6


def test_recording(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    torch._lazy.ts_backend.init()
    djinn.init(device="cpu", flush_every=None)
    with torch.no_grad():
        # What is first on the list is measured in the same turns as djinn; the others are for orientation.
        sides: dict[str, tuple[Mapping[str, Callable[[], torch.Tensor]], Callable[[], object]]] = {
            "lazy": (operators("lazy"), torch._lazy.mark_step), "djinn": (operators(DEVICE), djinn.synchronize)}
        taken: dict[tuple[str, str], list[float]] = {(side, name): [] for side in sides for name in operators("meta")}

        def turn() -> None:
            for side, name in sorted(taken, key=lambda key: key[1]):
                calls, settle = sides[side]
                taken[side, name].append(a_call_us(calls[name], settle))

        benchmark.pedantic(turn, rounds=TURNS, warmup_rounds=2)
        with FakeTensorMode():
            fake = operators("cpu")
        floor = operators("meta", lambda tensor: empty(tensor.size()))
        others = {"empty wrapper": floor, "eager": operators("cpu"), "meta": operators("meta"), "FakeTensor": fake}
        for side, calls in others.items():
            for name, call in calls.items():
                taken[side, name] = [a_call_us(call, bool, 100) for _ in range(3)]
    ratios = {name: statistics.median(ours / theirs for ours, theirs in zip(
        taken["djinn", name][-TURNS:], taken["lazy", name][-TURNS:], strict=True)) for name in sides["lazy"][0]}
    details = {f"{name}, {side} (us)": statistics.median(times[-TURNS:])
               for (side, name), times in sorted(taken.items(), key=lambda item: item[0][1])}
    publish(math.exp(statistics.fmean(map(math.log, ratios.values()))),
            {f"{name}, ratio": ratio for name, ratio in ratios.items()} | details)


def test_recording_gpt2(compare: Callable[..., Any], publish: Callable[..., None]) -> None:
    djinn.init(device="cpu", flush_every=None)
    model, ids = gpt2.gpt2(), torch.arange(16)[None]
    remote, there = copy.deepcopy(model).to(DEVICE), ids.to(DEVICE)
    assert torch.allclose(remote(there).logits.cpu(), model(ids).logits)
    djinn.reset_stats()

    with torch.no_grad():
        comparison = compare(lambda: model(ids), lambda: remote(there), turns=7, warmup_turns=2)
        operations = djinn.stats()["operations"] / 9
        assert djinn.stats()["round_trips"] == 0
    publish(comparison.cost, comparison.details | {"operations": operations})


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    made = x
    for _ in range(length):
        made = made + x
    return made


def test_pending_nodes(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    few, many = 1_000, 100_000
    djinn.init(device="cpu", flush_every=None)
    x = torch.ones(4, device=DEVICE)
    djinn.synchronize()
    recorded: dict[int, list[float]] = {few: [], many: []}
    handed_over: dict[int, list[float]] = {few: [], many: []}

    def record(length: int) -> None:
        recording = handing_over = 0.0
        for _ in range(many // length):
            begin = perf_counter()
            last = chain(x, length)
            middle = perf_counter()
            assert djinn.stats()["pending_nodes"] == length
            assert last.sum().item() == 4 * (length + 1)
            recording, handing_over = recording + middle - begin, handing_over + perf_counter() - middle
        recorded[length].append(recording / many * 1e6)
        handed_over[length].append(handing_over / many * 1e6)

    benchmark.pedantic(lambda: record(many), setup=lambda: record(few), rounds=3)
    ratio = statistics.median(m / f for m, f in zip(recorded[many], recorded[few], strict=True))
    publish(ratio, {f"{what}, {length} pending (us)": statistics.median(times[length])
                    for what, times in (("recorded", recorded), ("handed over and run", handed_over))
                    for length in (few, many)})


_GROWTH = """
import gc, sys
import torch
import djinn

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

djinn.init(device="cpu", flush_every=None)
x = torch.ones(4, device="remote_accelerator:0")
keeps, kept = sys.argv[1] == "kept", []
last = x
for _ in range(1000):
    last = last + x
djinn.synchronize()
before = resident()
for _ in range(100_000):
    last = last + x
    if keeps:
        kept.append(last)
assert djinn.stats()["pending_nodes"] == 100_000
print((resident() - before) / 100_000)
"""


def test_pending_memory(benchmark: BenchmarkFixture, publish: Callable[..., None]) -> None:
    def growth(what: str) -> float:
        done = subprocess.run([sys.executable, "-c", _GROWTH, what], check=True, capture_output=True, text=True)
        return float(done.stdout)

    publish(benchmark.pedantic(lambda: growth("last")), {"if every result is kept (bytes)": growth("kept")})
