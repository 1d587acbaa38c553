"""What a program is predicted to take on the connected executor, and what it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from support.models import gpt2, resnet18
from support.models.small_gpt import Training

import djinn
from djinn.session import runtime
from djinn_plugins.graph.graph import RecordedGraph
from djinn_plugins.schedule.costs import CostModel
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule
from djinn_plugins.schedule.semantics import with_meaning

DEVICE = "remote_accelerator:0"


@attrs.frozen
class Prediction:
    """A program, predicted and measured."""

    predicted_s: float
    measured_s: list[float]

    @property
    def median_s(self) -> float:
        """What it takes."""
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of the measured time and one: 1.25 is a fourth, either way."""
        return 1 + abs(self.predicted_s / self.median_s - 1)

    def __str__(self) -> str:
        return (f"predicted {self.predicted_s * 1e3:.2f} ms, measured {self.median_s * 1e3:.2f} ms "
                f"({min(self.measured_s) * 1e3:.2f} to {max(self.measured_s) * 1e3:.2f}), off by {self.error:.2f}")


def predicted_s(graph: RecordedGraph) -> float:
    """Predict what running a graph takes, until its client knows that it has run."""
    (known,) = djinn.profiles().values()
    device = DeviceInfo("there", profile=known.profile, home_link=known.home_link)
    order = tuple(node.id for node in graph.nodes())
    estimate = CostModel([device]).estimate(ExecutionSchedule(order, dict.fromkeys(order, "there")), graph)
    assert estimate.is_measured == known.is_measured
    return known.feed_link.latency_s + estimate.latency_s + known.home_link.latency_s


def predict(work: Callable[[], Any], runs: int = 7, warm_runs: int = 3) -> Prediction:
    """Record a piece of work, predict it, and run it; recording is not timed."""
    session = runtime.current()
    djinn.synchronize()
    taken: list[float] = []
    session.flush_after(None)
    written = torch.zeros(1, device=DEVICE)
    for _ in range(warm_runs + runs):
        # A server runs nothing ahead that writes.
        written.zero_()
        kept = work()
        begin = time.perf_counter()
        djinn.synchronize()
        taken.append(time.perf_counter() - begin)
        del kept
        djinn.flush()
    with djinn.capture(modules=False) as captured:
        kept = work()
    graph = with_meaning(djinn.annotate_graph(captured.graph))
    djinn.synchronize()
    del kept
    session.flush_after(session.config.flush_every)
    return Prediction(predicted_s(graph), taken[warm_runs:])


def gpt2_work() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Make GPT-2 124M there: a forward pass of 64 tokens, and the token after them with a cache."""
    with torch.device(DEVICE):
        model = gpt2.gpt2()
    prompt, token = torch.arange(64, device=DEVICE)[None], torch.tensor([[5]], device=DEVICE)

    def forward() -> Any:
        with torch.no_grad():
            return model(prompt)

    begun = forward().past_key_values
    keys = [(layer.keys, layer.values) for layer in begun.layers]

    def decode() -> Any:
        # Each time, the cache is as long as after the prompt.
        for layer, (key, value) in zip(begun.layers, keys, strict=True):
            layer.keys, layer.values = key, value
        with torch.no_grad():
            return model(token, past_key_values=begun).logits

    return forward, decode


def resnet_work() -> Callable[[], Any]:
    """Make ResNet-18 there: a forward pass of one image."""
    model, image = resnet18.resnet18().to(DEVICE), torch.randn(1, 3, 224, 224).to(DEVICE)

    def forward() -> Any:
        with torch.no_grad():
            return model(image)

    return forward


def training_work() -> Callable[[], Any]:
    """Make a small GPT there: a training step with AdamW."""
    training = Training(DEVICE)
    return lambda: training.steps(1, read_every=10**9)
