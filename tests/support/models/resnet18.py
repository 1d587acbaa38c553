"""ResNet-18 with random weights, by configuration."""

from __future__ import annotations

import torch
from transformers import ResNetConfig, ResNetModel


def resnet18() -> ResNetModel:
    """Make the model: two basic layers in each of four stages."""
    torch.manual_seed(0)
    return ResNetModel(ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2],
                                    layer_type="basic")).eval()
