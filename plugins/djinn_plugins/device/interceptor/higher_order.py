"""Operators of higher order, such as ``torch.cond``, on lazy tensors; flex attention is one of them.

They call functions. PyTorch wants a rule from each class of tensors for each of them, and calls their own
implementation for ordinary tensors of every device. It is called for lazy tensors here, too, so that the operations in
these functions are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.imports import follow_imports

__all__ = ("install",)

_SUBCLASSES, _DEVICE = torch._C.DispatchKey.Python, torch._C.DispatchKey.PrivateUse1
_FLEX = "torch.nn.attention.flex_attention"


def install() -> None:
    """Let such operators run, and flex attention accept the device once a program has imported it."""
    operator: Any = HigherOrderOperator
    operator.dispatch = _dispatching(operator.dispatch)
    follow_imports((_FLEX,), _accept_device)


def _dispatching(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dispatch)
    def dispatch_(self: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        if key == _SUBCLASSES and _get_current_dispatch_mode() is None and _are_lazy(args, kwargs):
            key = _DEVICE
        return dispatch(self, key, *args, **kwargs)

    return dispatch_


def _are_lazy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no argument is of another class with rules."""
    return all(type(item) is LazyTensor or not torch._C._dispatch_keys(item).has(_SUBCLASSES)
               for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor))


def _accept_device(module: ModuleType) -> None:
    flex: Any = module
    check = flex._validate_device

    @functools.wraps(check)
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Accept this device, too; PyTorch's own check has a fixed list."""
        if query.device.type != devices.logical_device().type:
            check(query, key, value)

    flex._validate_device = validate_device
