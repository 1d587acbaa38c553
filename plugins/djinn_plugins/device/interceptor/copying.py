"""Copies, which stay on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from djinn.record.tensor import LazyTensor
from djinn_plugins.device.interceptor.saving import RemoteStorage, may_have_other_values
from djinn_plugins.device.interceptor.subclasses import ordinary_class


def shallow_copy(tensor: LazyTensor) -> Any:
    """Return another tensor with the same storage and attributes: what ``copy.copy`` does."""
    if type(tensor) is not LazyTensor and not ordinary_class(type(tensor)):
        return copy._reconstruct(tensor, None, *tensor.__reduce_ex__(4))  # type: ignore[attr-defined]  # as copy.copy
    made: Any = tensor.data
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.requires_grad:
            made.requires_grad_()
    vars(made).update({name: item for name, item in vars(tensor).items() if name != "_value"})
    return made


def deepcopy(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy a lazy tensor as PyTorch does: a parameter alone, another one with its storage, gradient and attributes.

    Raises:
        RuntimeError: It is the result of an operation that autograd recorded, as for any tensor.
    """
    tensor, memo = args
    if id(tensor) in memo:
        return memo[id(tensor)]
    is_parameter = getattr(tensor, "_is_param", False)
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                               "protocol at the moment.")
        # Within a transform of `torch.func`, the copy is no more its own than the tensor.
        with torch.no_grad(), torch._C._DisableFuncTorch():
            made: Any = tensor.detach().clone() if is_parameter else _with_storage(tensor, memo.setdefault("torch", {}))
        if tensor.requires_grad:
            made.requires_grad_()
        made.__class__ = type(tensor)
        memo[id(tensor)] = made
        if is_parameter and type(tensor) is LazyTensor:
            # The gradient and what a program has attached stay behind, as in eager.
            made._is_param = True
            return made
        if tensor.grad is not None and not is_parameter:
            made.grad = LazyTensor.__deepcopy__(tensor.grad, memo)
    for name, attribute in vars(tensor).items():
        if name != "_value":
            setattr(made, name, copy.deepcopy(attribute, memo))
    return made


def _with_storage(tensor: LazyTensor, copies: dict[Any, Any]) -> LazyTensor:
    """Copy a tensor and its storage, unless that was copied before.

    Args:
        tensor: The tensor.
        copies: The copies of storages.
    """
    storage, spec = RemoteStorage.of(tensor), tensor._value.spec
    if may_have_other_values(tensor) or not storage.nbytes():
        return tensor.detach().clone()  # type: ignore[return-value]  # lazy
    copied = storage.copied(copies)
    made = copied.tensor if storage.is_tensor() and not copied.copies else copied.within(spec)
    copied.copies.append(made)
    return made
