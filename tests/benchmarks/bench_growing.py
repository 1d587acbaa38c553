"""GPT-2 124M decodes with a cache of 4,096 tokens: written into spare room, against copied for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.gpt2 import gpt2
from transformers import DynamicCache

import djinn
from djinn_plugins.executor.cpu.executor import CpuExecutor
from djinn_plugins.executor.torch.growing import GrowingValues

DEVICE = "remote_accelerator:0"
LENGTH = 4096
TOKENS = 4
"""A turn."""
NEVER_BYTES = 2**60


class Decoding:
    """One text that is continued greedily."""

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.cache = DynamicCache(config=model.config)
        for layer in range(model.config.n_layer):
            keys, values = (torch.randn(1, 12, LENGTH, 64, generator=generator).to(DEVICE) for _ in range(2))
            self.cache.update(keys, values, layer)
        self.model, self.token, self.logits = model, torch.tensor([[5]]).to(DEVICE), list[torch.Tensor]()

    @torch.no_grad()
    def turn(self) -> None:
        """Decode some tokens."""
        for _ in range(TOKENS):
            logits = self.model(self.token, past_key_values=self.cache, use_cache=True).logits[:, -1]
            self.logits.append(logits.cpu())
            self.token = logits.argmax(-1, keepdim=True)


def test_growing(
    compare: Callable[..., Any], publish: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[GrowingValues] = []
    make = CpuExecutor.spare_room

    def kept(executor: CpuExecutor) -> GrowingValues:
        rooms.append(make(executor))
        return rooms[-1]

    monkeypatch.setattr(CpuExecutor, "spare_room", kept)
    djinn.init(device="cpu")
    model = gpt2(n_positions=2 * LENGTH).to(DEVICE)
    copied, grown = Decoding(model), Decoding(model)
    least_bytes = rooms[0]._least_bytes

    def rival() -> None:
        rooms[0]._least_bytes = NEVER_BYTES
        copied.turn()

    def ours() -> None:
        rooms[0]._least_bytes = least_bytes
        grown.turn()

    comparison = compare(rival, ours, turns=5, warmup_turns=2)
    assert rooms[0].joined > 5 * TOKENS * 2 * model.config.n_layer
    assert all(torch.equal(one, other) for one, other in zip(copied.logits, grown.logits, strict=True))
    publish(comparison.speed, comparison.details)
