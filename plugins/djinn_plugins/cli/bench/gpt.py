"""A small GPT with random weights, made of PyTorch alone."""

from __future__ import annotations

import attrs
import torch
from torch import nn

__all__ = ("GptShape", "SmallGpt", "generate")


@attrs.frozen
class GptShape:
    """The size of a model; by default 3.3 million parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 512
    context: int = 64


class SmallGpt(nn.Module):
    """Decoder blocks between an embedding and a head."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.randn(shape.context, shape.width) * 0.02)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token that follows each window."""
        hidden = self.tokens(window) + self.positions[:window.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden[:, -1]))
        return logits


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)
        self.widen, self.narrow = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                             for part in self.qkv(self.norm_1(hidden)).split(width, dim=2))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm_2(hidden))))
        return hidden + added


def generate(model: SmallGpt, window: torch.Tensor, count: int) -> list[int]:
    """Generate tokens one by one and read each, as a chat does."""
    found = []
    with torch.no_grad():
        for _ in range(count):
            following = model(window).argmax(-1, keepdim=True)
            window = torch.cat([window[:, 1:], following], 1)
            found.append(int(following))
    return found
