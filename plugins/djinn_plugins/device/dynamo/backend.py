"""The backend that ``torch.compile`` finds by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_plugins.device.dynamo.compiled import CompiledGraph
from djinn_plugins.device.dynamo.remote_graphs import RemoteGraph, is_remote


def compile_graph(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph | RemoteGraph:
    """Prepare a captured graph to run remotely. If no session is running, the first call starts one.

    Args:
        module: The graph that Dynamo captured: PyTorch functions on placeholders.
        example_inputs: Its inputs when it was captured; only whether they are remote counts.
    """
    return RemoteGraph(module) if is_remote(module, example_inputs) else CompiledGraph(module)
