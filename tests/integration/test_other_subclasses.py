"""Tensor subclasses of other libraries meet remote tensors as they would meet ordinary ones."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from torch.nn import functional as F

import djinn  # noqa: F401  # registers the device

DEVICES = ("cpu", "remote_accelerator:0")


class Halved(torch.Tensor):
    """A weight that is stored as a half of itself, as quantizing libraries make such: it knows one function."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype, device=stored.device)
        return made

    def __init__(self, stored: torch.Tensor) -> None:
        self.stored = stored

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, known) for known in types):
            return NotImplemented
        if func is F.linear:
            return F.linear(args[0], args[1].stored * 2)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"Halved does not know {func}")


@pytest.mark.parametrize("device", DEVICES)
def test_a_subclass_handles_the_functions_that_it_knows_whichever_operand_comes_first(device: str) -> None:
    weight = torch.arange(6.0, device=device).reshape(2, 3)
    inputs = torch.ones(4, 3, device=device)
    result = F.linear(inputs, Halved(weight / 2))
    assert type(result) is type(inputs)
    assert torch.equal(result, F.linear(inputs, weight))


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_subclass_does_not_know_is_its_own_error(device: str) -> None:
    with pytest.raises(NotImplementedError, match="Halved does not know aten"):
        torch.ones(2, device=device) + Halved(torch.ones(2, device=device))
