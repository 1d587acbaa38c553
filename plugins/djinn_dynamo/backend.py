"""The backend that ``torch.compile`` finds by its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from djinn_dynamo.compiled import CompiledGraph


def compile_graph(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
    """Make a captured graph run remotely. Starts no session; the first call does, where none is running.

    Args:
        module: What Dynamo captured: functions of PyTorch on placeholders.
        example_inputs: Not needed: metadata is taken from the calls.
    """
    return CompiledGraph(module)
