"""Recurrent layers over packed sequences give the bits of local PyTorch, results and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

DEVICE = "remote_accelerator:0"
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "both directions": {"bidirectional": True, "num_layers": 2}, "no bias": {"bias": False},
    "batch first": {"batch_first": True}, "projected": {"proj_size": 3, "bidirectional": True},
}


@pytest.mark.parametrize("lengths", [[4, 3, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("options", _OPTIONS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_give_the_same_bits(kind: Any, options: str, lengths: list[int]) -> None:
    given = {name: item for name, item in _OPTIONS[options].items() if name != "proj_size" or kind is nn.LSTM}
    torch.manual_seed(0)
    model, x = kind(5, 7, **given), torch.randn(len(lengths), max(lengths), 5)

    def found(device: str, *, training: bool) -> list[torch.Tensor]:
        moved, data = copy.deepcopy(model).train(training).to(device), x.to(device).requires_grad_(training)
        packed = pack_padded_sequence(data if "batch_first" in given else data.transpose(0, 1), torch.tensor(lengths),
                                      batch_first="batch_first" in given)
        output, state = moved(packed)
        made = [output.data, *(state if isinstance(state, tuple) else [state])]
        if training:
            torch.stack([item.square().sum() for item in made]).sum().backward()
            made += [item.grad for item in (data, *moved.parameters())]
        return [item.detach().cpu() for item in made]

    for training in (False, True):
        with torch.set_grad_enabled(training):
            for made, expected in zip(found(DEVICE, training=training), found("cpu", training=training), strict=True):
                assert torch.equal(made, expected)
