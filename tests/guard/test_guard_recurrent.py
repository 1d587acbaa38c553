"""The guard's rule for the backward pass of recurrent layers: it asks the kernel how much its forward pass leaves."""

from __future__ import annotations

import pytest
import torch
from support.operators.recipes import RECIPES

from djinn_plugins.guard import fused_kernels as layers
from djinn_plugins.guard.fused_kernels import recurrent, recurrent_backward


def test_what_was_estimated_with_placeholders_is_not_believed_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of memory ask the same rule, and the kernel gives no workspace for placeholders."""
    monkeypatch.setattr(layers, "_WORKSPACES", {})
    (recipe,) = RECIPES["mkldnn_rnn_layer_backward"]
    real = recipe()
    assert real["workspace"].numel() > 0
    placeholders = {name: item.to("meta") if isinstance(item, torch.Tensor) else item for name, item in real.items()}
    recurrent_backward(placeholders)
    recurrent_backward(real)
    with pytest.raises(RuntimeError, match="workspace has 1 elements"):
        recurrent_backward({**real, "workspace": torch.zeros(1, dtype=torch.uint8)})


def test_a_layer_without_sequences_is_not_run() -> None:
    (recipe,) = RECIPES["mkldnn_rnn_layer"]
    made = recipe()
    recurrent(made)
    with pytest.raises(RuntimeError, match="no recurrent layer"):
        recurrent({**made, "input": torch.empty(3, 0, 4, device="meta")})
