"""Members that are added to the class of lazy tensors: constructor, factories, shallow copies, and the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.device.interceptor import origins
from djinn_plugins.device.interceptor.copying import shallow_copy
from djinn_plugins.device.interceptor.storage_references import OWN_ATTRIBUTES

__all__ = ("install",)


def _factory(make: Callable[..., Any]) -> Any:
    def factory(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{"device": devices.logical_device(), **kwargs})

    factory.__name__ = make.__name__
    factory.__doc__ = f"As ``torch.{make.__name__}``, on the remote accelerator."
    return staticmethod(factory)


def _from_numpy(array: Any) -> Any:
    """Upload an array. As ``torch.from_numpy``, but a copy."""
    return runtime.current().upload(torch.from_numpy(array))


def _make(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Create a parameter of data on any device: ``type(parameter)(data, requires_grad=...)``.

    Libraries also pass ``**parameter.__dict__``, which is empty in eager. djinn's own attributes are dropped.

    ``LazyTensor(operation="aten::add", inputs=[x, 1])`` records an operation instead.
    """
    if "operation" in kwargs:
        return origins.record(**kwargs)
    if (args and isinstance(args[0], torch.Tensor)) or isinstance(kwargs.get("data"), torch.Tensor):
        return torch.nn.Parameter(*args, **{name: item for name, item in kwargs.items() if name not in OWN_ATTRIBUTES})
    return torch.Tensor.__new__(cls, *args, **kwargs)


def _initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing: the constructor has done it."""


def install() -> None:
    """Add the methods to the class, among them factories such as ``LazyTensor.randn(2, 3)``."""
    cls: Any = LazyTensor
    cls.__new__, cls.__init__, cls.__copy__ = _make, _initialize, shallow_copy
    for make in (torch.randn, torch.rand, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.eye,
                 torch.linspace, torch.logspace, torch.randint, torch.randperm, torch.normal, torch.tensor,
                 torch.as_tensor, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like,
                 torch.randn_like, torch.randint_like):
        setattr(LazyTensor, make.__name__, _factory(make))
    cls.from_numpy = staticmethod(_from_numpy)
    for name, member in origins.MEMBERS.items():
        setattr(cls, name, property(member))
