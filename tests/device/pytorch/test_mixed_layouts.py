"""Strides of results whose operands lie in memory in different ways, here and on a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.recording.eager import Program, assert_same, programs
from torch import nn

import djinn


@pytest.fixture(autouse=True, params=["server", "here"])
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    djinn.init(request.getfixturevalue("server").address if request.param == "server" else None)
    yield
    djinn.shutdown()


def dropout_before_a_convolution(device: str) -> Any:
    linear, convolution = nn.Linear(6, 4), nn.Conv1d(4, 5, 3)
    linear, convolution = linear.to(device), convolution.to(device)
    x = torch.randn(2, 7, 6).to(device)
    torch.manual_seed(1)
    convolution(F.dropout(linear(x), 0.1).transpose(1, 2)).sum().backward()
    return [parameter.grad for parameter in (*linear.parameters(), *convolution.parameters())]


def gradients_laid_out_otherwise(device: str) -> Any:
    x = torch.randn(3, 4).to(device)
    found = []
    for function in (F.log_softmax, F.softmax):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf, 1), leaf, torch.randn(4, 3).to(device).t())
        found += [gradient, gradient.as_strided((12,), (1,))]
    return found


def strides_of_single_elements(device: str) -> Any:
    x = torch.randn(2, 1, 3).to(device)
    odd = x.as_strided((2, 1, 3), (3, 7, 1))
    wide = torch.randn(1, 4, 2, 3).to(device).contiguous(memory_format=torch.channels_last)[:, :1]
    made = [-odd, odd + 1, odd * 2, odd + x, torch.zeros_like(odd), odd.exp(), wide * 2, wide + wide, torch.relu(wide),
            odd.masked_fill(x > 0, 0), torch.where(x > 0, odd, x), odd.softmax(-1), odd**2, 1 - odd]
    return made, [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in made if tensor.dim() == 4]


@programs(dropout_before_a_convolution, gradients_laid_out_otherwise, strides_of_single_elements)
def test_strides_are_those_of_eager(program: Program) -> None:
    assert_same(program)
