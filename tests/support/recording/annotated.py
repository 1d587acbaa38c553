"""Recording a piece of work on the remote accelerator, and annotating it with the plugins of this repository."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

import djinn
import djinn_plugins.graph.patterns
from djinn_plugins.graph.analyzer.analyzer import CoreAnalyzer
from djinn_plugins.graph.graph import Graph
from djinn_plugins.graph.kinds import Annotations, Pattern, PatternMatch
from djinn_plugins.graph.metadata import Tier

DEVICE = "remote_accelerator:0"
BY_STRUCTURE = (Tier.OPERATION, Tier.STRUCTURE)


@cache
def _patterns() -> tuple[Pattern, ...]:
    registered: list[Pattern] = []
    djinn_plugins.graph.patterns.djinn_register_patterns(registered.append)
    return tuple(registered)


def matches_in(graph: Graph) -> list[PatternMatch]:
    """What the core patterns find."""
    return [match for pattern in _patterns() for match in pattern.find(graph)]


def annotated(graph: Graph, tiers: Collection[Tier] = tuple(Tier)) -> Annotations:
    """What the core analyzer says."""
    return CoreAnalyzer(tiers).annotate(graph, matches_in(graph))


def there(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Move inputs to the remote accelerator."""
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def recorded(model: nn.Module, work: Callable[[], object]) -> Graph:
    """Record what is done with a model that is on the remote accelerator."""
    with djinn.capture(model) as captured:
        work()
    return captured.graph
