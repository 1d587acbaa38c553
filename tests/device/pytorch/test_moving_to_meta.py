"""Modules that go to the meta device: what others hold of them stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


def _facts(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.is_meta, tensor.requires_grad, isinstance(tensor, nn.Parameter), tensor.is_meta or tensor.tolist()


def _story_of_meta(device: str, move: Callable[[nn.Module], Any]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(device)
    model[2].weight = model[0].weight
    first, view, mean = model[0].weight, model[0].weight[0], model[1].running_mean
    result = model(torch.arange(4.0, device=device).reshape(2, 2)).square().sum()
    model[0](torch.ones(1, 2, device=device)).sum().backward()
    move(model)
    result.backward()
    held = [first, first.grad, view, mean, model[0].weight, model[0].weight.grad, model[1].running_mean]
    facts = [_facts(tensor) for tensor in held]
    model.to_empty(device=device)
    return [*facts, model[0].weight is first, model[0].weight is model[2].weight, model[0].weight.shape]


@pytest.mark.parametrize("move", [lambda model: model.to("meta"), lambda model: model.to_empty(device="meta"),
                                  lambda model: model[0].to("meta")], ids=["to", "to_empty", "a part"])
def test_parameters_of_a_module_that_goes_to_meta_stay_with_those_who_hold_them(
    move: Callable[[nn.Module], Any]
) -> None:
    assert _story_of_meta("remote_accelerator", move) == _story_of_meta("cpu", move)


@pytest.mark.parametrize("make", [torch.clone, nn.Parameter, nn.Buffer])
def test_data_cannot_be_that_of_meta(make: Callable[..., Any]) -> None:
    for device in ("cpu", "remote_accelerator"):
        held = make(torch.ones(2, device=device))
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            held.data = torch.zeros(2, device="meta")
        assert held.tolist() == [1, 1]
