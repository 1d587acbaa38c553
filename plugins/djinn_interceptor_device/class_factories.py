"""Factories as methods of the class of lazy tensors: ``LazyTensor.randn(2, 3)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn.record.tensor import LazyTensor

__all__ = ("install",)


def _factory(make: Callable[..., Any]) -> Any:
    def factory(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{"device": devices.logical_device(), **kwargs})

    factory.__name__ = make.__name__
    factory.__doc__ = f"As ``torch.{make.__name__}``, on the remote accelerator."
    return staticmethod(factory)


def install() -> None:
    """Add the factories to the class."""
    for make in (torch.randn, torch.rand, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.eye,
                 torch.linspace, torch.randint, torch.randperm):
        setattr(LazyTensor, make.__name__, _factory(make))
