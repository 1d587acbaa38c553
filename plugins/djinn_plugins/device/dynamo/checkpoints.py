"""Activation checkpoints within captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn


def restore_checkpoints(module: torch.fx.GraphModule) -> None:
    """Let the checkpoints of a captured graph keep the state of random numbers.

    Dynamo's own operator leaves random numbers to a compiler that decomposes. Run as it is, it recomputes with others.
    """
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            found = part.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
            for node in found:
                node.target = checkpointed
            if found:
                part.recompile()


def checkpointed(part: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Run a part of a graph, and run it again in the backward pass instead of keeping its values."""
    options |= {"use_reentrant": False, "context_fn": part.meta.get("_checkpoint_context_fn", noop_context_fn)}
    return checkpoint(part, *args, **options)
