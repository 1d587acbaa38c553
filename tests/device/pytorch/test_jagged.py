"""Jagged nested tensors: attention over sequences of several lengths, and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recording.eager import DEVICE, assert_same

import djinn

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


def program(device: str) -> Any:
    rows = [torch.randn(length, 2, 8).to(device) for length in (3, 5, 1)]
    layer = torch.nn.Linear(8, 8).to(device)
    heads = layer(torch.nested.nested_tensor(rows, layout=torch.jagged)).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
    attended.values().square().sum().backward()
    flat = torch.nested.nested_tensor([row[:, 0] for row in rows], layout=torch.jagged)
    padded = torch.nested.to_padded_tensor(flat, 2.0)
    weight = torch.ones(8, device=device, requires_grad=True)
    torch.nested.to_padded_tensor(flat * weight, 0.0).square().sum().backward()
    return (attended.values(), attended.offsets(), layer.weight.grad, padded, flat.mean(1), flat.softmax(1).values(),
            weight.grad)


def test_attention_and_padding_give_what_eager_gives() -> None:
    assert_same(program)


def test_causal_attention_is_that_of_each_sequence() -> None:
    rows = [torch.randn(2, length, 8) for length in (3, 4)]
    nested = torch.nested.nested_tensor([row.transpose(0, 1).to(DEVICE) for row in rows],
                                        layout=torch.jagged).transpose(1, 2)
    F.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    djinn.reset_stats()
    found = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    assert djinn.stats()["round_trips"] == 0, "lengths are known"
    for mine, row in zip(found.transpose(1, 2).unbind(), rows, strict=True):
        wanted = F.scaled_dot_product_attention(row, row, row, is_causal=True)
        torch.testing.assert_close(mine.transpose(0, 1).cpu(), wanted)


def choices(device: str) -> Any:
    jagged = torch.nested.nested_tensor([torch.ones(3), -torch.ones(2)], device=device, layout=torch.jagged)
    return [torch.where(jagged > 0, *pair).values() for pair in ((jagged, 0.0), (0.0, jagged), (1.0, 0.0))]


def test_a_choice_between_a_jagged_tensor_and_a_number_gives_what_eager_gives() -> None:
    assert_same(choices)
