"""Sources make graphs of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from djinn_lib_graph.graph import Graph


class GraphSource(Protocol):
    """Makes the graph of one call of a model, in the terms of what lazy tensors record of it.

    Modes are the caller's: under ``torch.no_grad()`` composites stay whole, with gradients they are taken apart.
    """

    name: str
    """Name in the configuration."""

    def build(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
        """Make the graph of ``model(*args, **kwargs)``.

        Args:
            model: The model; its weights may be anywhere. Not to be changed, running statistics included.
            args: Its inputs. Not to be changed.
            kwargs: Its inputs by name. Not to be changed.

        Returns:
            The operations of the call, with the modules that they belong to, and its values with the model's names for
            them. If it does not come from where graphs of this source come from, ``fallback_reason`` says why.

        Raises:
            Exception: What the model raises when it is called.

        Concurrency:
            The model is not to be used by another thread meanwhile.

        Laws:
            source.graph_well_formed, source.as_recorded, source.deterministic, source.model_unchanged,
            source.fallback_told, source.sends_nothing_when_traced, source.refused_call
        """
