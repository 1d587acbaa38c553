"""Small models with random weights: files of a server's store, and the right answers of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
from safetensors.torch import save_file
from support.models.small_gpt import CONTEXT, VOCABULARY, SmallGPT
from torch import nn

CASES = 4
FEATURES, CLASSES, SIDE = 64, 10, 32


@attrs.frozen(eq=False)
class StoredModel:
    """A model of the store.

    Attributes:
        name: Its name there.
        make: Makes the module.
        inputs: What clients ask it.
        answers: What it answers on the CPU.
        size_bytes: Of its weights.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    answers: tuple[torch.Tensor, ...]
    size_bytes: int

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """Make the module around tensors of the store."""
        with torch.device("meta"):
            module = self.make()
        module.load_state_dict(weights, assign=True)
        return module.eval()


def dense(width: int) -> nn.Module:
    """A multi-layer perceptron."""
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(),
                         nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))


def convolutional(channels: int) -> nn.Module:
    """A classifier of small images."""
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
                         nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(channels * (SIDE // 4) ** 2, CLASSES))


def write_models(folder: Path, count: int, seed: int) -> list[StoredModel]:
    """Write models with random weights and of random sizes to a folder, each kind in turn."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    made = []
    for number in range(count):
        make, draw = (
            (partial(dense, choose.randrange(384, 1025, 64)), lambda: torch.randn(256, FEATURES)),
            (partial(convolutional, choose.randrange(16, 49, 8)), lambda: torch.randn(16, 3, SIDE, SIDE)),
            (SmallGPT, lambda: torch.randint(VOCABULARY, (4, CONTEXT))))[number % 3]
        module = make().eval()
        inputs = tuple(draw() for _ in range(CASES))
        with torch.no_grad():
            answers = tuple(module(each) for each in inputs)
        weights = module.state_dict()
        name = f"model-{number:02}"
        save_file(weights, folder / f"{name}.safetensors")
        made.append(StoredModel(name, make, inputs, answers, sum(each.nbytes for each in weights.values())))
    return made
