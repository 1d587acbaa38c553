"""Small models for graph sources, and calls of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from djinn.record import devices
from djinn_conformance.oracle import seeded
from djinn_plugins.graph.capture import capture
from djinn_plugins.graph.graph import Graph

__all__ = ("ModelCall", "asking_calls", "calls", "content", "straight_calls")


class _Perceptron(nn.Module):
    """Tied weights, dropout, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) + self.shift
        logits: torch.Tensor = self.head(hidden + self.body(hidden))
        return logits.log_softmax(-1)


class _Attention(nn.Module):
    """Views, a mask by name, and one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return {"hidden": self.norm(x + self.out(mixed.transpose(1, 2).flatten(2)))}


class _Convolutions(nn.Module):
    """Running statistics written in training, and results written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.second(self.norm(self.first(x)).relu_())
        made[:, 0] = 0.0
        return functional.max_pool2d(made, 2).mean((-1, -2))


class _Gathering(nn.Module):
    """Nested inputs, numbers, tensors created by the model, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)

    def forward(self, parts: Sequence[torch.Tensor], scale: float, extra: Mapping[str, torch.Tensor]) -> torch.Tensor:
        state = torch.zeros_like(parts[0])
        for part in parts:
            state = torch.tanh(self.cell(part) + state * scale)
        ranks = torch.arange(state.shape[-1], device=state.device)
        return torch.cat([state, extra["bias"].expand_as(state)], dim=0).masked_fill(ranks > 3, 0.0)


class _Branching(nn.Module):
    """Data-dependent control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken: torch.Tensor = self.yes(x).relu() if x.sum() > 0 else self.no(x).tanh()
        return taken


class _Selecting(nn.Module):
    """Data-dependent sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.project(x[x.sum(-1) > 0])
        return chosen.sum(0)


def _ids(batch: int, sign: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.arange(batch * 5).reshape(batch, 5) % 12,), {}


def _masked(batch: int, sign: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.linspace(-1, 1, batch * 32).reshape(batch, 4, 8),), {"mask": torch.ones(4, 4).tril().bool()}


def _images(batch: int, sign: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.linspace(-1, 1, batch * 48).reshape(batch, 3, 4, 4),), {}


def _nested(batch: int, sign: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parts = [torch.full((batch, 6), 0.5), torch.linspace(-1, 1, batch * 6).reshape(batch, 6)]
    return (parts, 0.5), {"extra": {"bias": torch.ones(1, 6)}}


def _signed(batch: int, sign: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.full((batch, 4), float(sign)),), {}


_STRAIGHT = ((_Perceptron, _ids), (_Attention, _masked), (_Convolutions, _images), (_Gathering, _nested))
_ASKING = ((_Branching, _signed), (_Selecting, _signed))


@attrs.frozen
class ModelCall:
    """A call of a small model, which can be repeated."""

    kind: type[nn.Module]
    inputs: Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]] = attrs.field(repr=False)
    batch: int
    sign: int
    """Sign of the numbers that control flow depends on."""
    trains: bool
    wants_gradients: bool

    def model(self) -> nn.Module:
        """Create the model, the same one each time."""
        with seeded(torch.device("cpu"), 0):
            return self.kind().train(self.trains)

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Create its inputs."""
        return self.inputs(self.batch, self.sign)

    def recorded(self) -> Graph:
        """Return the graph that the call records on the remote device."""
        device = devices.logical_device()
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self.given())
        model = self.model().to(device)
        with torch.set_grad_enabled(self.wants_gradients), capture(model) as captured:
            model(*args, **kwargs)
        graph: Graph = captured.graph
        return graph


def _drawn(models: Sequence[tuple[type[nn.Module], Any]]) -> st.SearchStrategy[ModelCall]:
    return st.builds(lambda model, **rest: ModelCall(*model, **rest), st.sampled_from(models), batch=st.integers(1, 3),
                     sign=st.sampled_from((1, -1)), trains=st.booleans(), wants_gradients=st.booleans())


def straight_calls() -> st.SearchStrategy[ModelCall]:
    """Draw calls of models that request no values."""
    return _drawn(_STRAIGHT)


def asking_calls() -> st.SearchStrategy[ModelCall]:
    """Draw calls of models with data-dependent control flow or sizes."""
    return _drawn(_ASKING)


def calls() -> st.SearchStrategy[ModelCall]:
    """Draw calls of all models."""
    return _drawn((*_STRAIGHT, *_ASKING))


def content(graph: Graph) -> dict[str, list[Any]]:
    """Normalize a graph for comparison: values are numbered in the order in which nodes mention them."""
    names: dict[str, int] = {}
    for node in graph.nodes():
        for value in (*node.inputs, *node.outputs):
            names.setdefault(value, len(names))
    owners: dict[str, int] = {}
    return {
        "operations": [node.operation for node in graph.nodes()],
        "values read, made and written": [
            [[names[value] for value in held] for held in (node.inputs, node.outputs, node.writes)]
            for node in graph.nodes()],
        "arguments": [repr((node.arguments, sorted(node.keywords.items()))) for node in graph.nodes()],
        "metadata": [repr((node.input_specs, node.specs, node.is_random)) for node in graph.nodes()],
        "origins": [node.origin for node in graph.nodes()],
        "values from outside": sorted((names[value], info.name, info.kind, repr(info.spec))
                                      for value, info in graph.values.items() if value in names),
        "storages": [owners.setdefault(graph.storages.get(value, value), len(owners)) for value in names],
    }
