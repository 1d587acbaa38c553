"""The source ``fx``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from djinn_plugins.graph.graph import RecordedGraph


class FxSource:
    """Traces models, and runs those that cannot be traced."""

    name = "fx"

    def build(self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RecordedGraph:
        """Build the graph of a call, as `djinn_plugins.graph.fx_source.builder.TracedGraphBuilder` does."""
        # Imported on first use, because every session registers this source.
        from djinn_plugins.graph.fx_source.builder import TracedGraphBuilder

        return TracedGraphBuilder().build_from_model(model, *args, **kwargs)
