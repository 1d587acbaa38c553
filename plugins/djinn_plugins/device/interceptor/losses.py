"""LostValues whose operators PyTorch defines in Python, on first use.

A server does not have these operators: it runs those of the namespace ``aten``, and of others that its operator allows.
Each consists of ordinary operators, which are recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from djinn.record.tensor import LazyTensor
from djinn_plugins.common.once import once

__all__ = ("linear_cross_entropy",)


def linear_cross_entropy(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the loss so that the parts of its operators are recorded."""
    _record_parts()
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


@once
def _record_parts() -> None:
    from torch.nn.modules import linear_cross_entropy as module

    for definition in vars(module).values():
        if isinstance(definition, CustomOpDef):
            definition.register_torch_dispatch(LazyTensor, _parts_of(definition))


def _parts_of(definition: CustomOpDef) -> Callable[..., Any]:
    def run(cls: type, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return definition._init_fn(*args, **(kwargs or {}))

    return run
