"""The backend that ``torch.compile`` finds by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_dynamo.compiled import CompiledGraph


def compile_graph(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
    """Prepare a captured graph to run remotely. If no session is running, the first call starts one.

    Args:
        module: The graph that Dynamo captured: PyTorch functions on placeholders.
        example_inputs: Not used: metadata is taken from the calls.
    """
    return CompiledGraph(module)
