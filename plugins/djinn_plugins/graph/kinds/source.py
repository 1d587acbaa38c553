"""Sources build graphs from models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from djinn_plugins.graph.graph import Graph


class GraphSource(Protocol):
    """Builds the graph of one call of a model, in the same form as lazy tensors would record it.

    The caller sets the modes: under ``torch.no_grad()`` composites stay whole, with gradients they are decomposed.
    """

    name: str
    """Name in the configuration."""

    def build(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
        """Build the graph of ``model(*args, **kwargs)``.

        Args:
            model: The model; its weights may be on any device. Must not be changed, including running statistics.
            args: Its inputs. Must not be changed.
            kwargs: Its inputs by name. Must not be changed.

        Returns:
            The operations of the call, with the modules that they belong to, and its values with the model's names for
            them. If it was not built in this source's usual way, ``fallback_reason`` says why.

        Raises:
            Exception: Any exception of the model.

        Concurrency:
            No other thread may use the model during the call.

        Laws:
            source.graph_well_formed, source.as_recorded, source.deterministic, source.model_unchanged,
            source.fallback_told, source.sends_nothing_when_traced, source.refused_call
        """
