"""Ordinary tensors that become lazy where they are, because ``data`` was assigned.

PyTorch lets ``data`` of a CPU tensor take a tensor of an accelerator, views and graphs notwithstanding, if it finds the
two compatible; the question is an operator of its own, which is answered here. The tensor then is one of this device
and of `LazyTensor`, but has no Python key, which PyTorch gives to new tensors only. Its operations arrive at the
device's kernels instead. PyTorch has kernels for any device that look at nothing but metadata, and those would not ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from djinn import runtime
from djinn.tensor import LazyTensor

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_ASKED = (
    "alias", "as_strided_", "clone", "copy_", "detach", "diagonal", "expand", "permute", "resize_as_", "select.int",
    "slice.Tensor", "split.Tensor", "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "squeeze_",
    "squeeze_.dim", "squeeze_.dims", "t", "t_", "transpose.int", "transpose_", "unbind.int", "unsqueeze", "unsqueeze_",
    "view.dtype", "_conj", "_neg_view",
)
"""Operators that PyTorch carries out on any device by itself."""


def register(library: torch.library.Library, kernel: Callable[[Any], Callable[..., Any]]) -> None:
    """Register the kernels; ``kernel`` makes the one of an operator that is simply recorded."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("_has_compatible_shallow_copy_type", become, key)
    for name in _ASKED:
        packet, _, overload = name.partition(".")
        library.impl(name, kernel(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")


def can_be_swapped(tensor: torch.Tensor) -> bool:
    """Whether nothing in PyTorch itself, such as a view or a graph, holds on to the tensor."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # missing from the stub
    return count == 1 and not isinstance(tensor, LazyTensor)


def is_adopted(tensor: torch.Tensor) -> bool:
    """Whether the tensor was an ordinary one before its data was assigned."""
    return not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def move_home(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Turn a lazy tensor into the ordinary tensor that is assigned to its ``data``, for everybody who holds it."""
    tensor, new = args
    with torch._C.DisableTorchFunctionSubclass():
        needs_gradient, gradient = tensor.requires_grad, tensor.grad
        local = new.detach()
        made = (torch.nn.Parameter(local, needs_gradient) if getattr(tensor, "_is_param", False)
                else local.requires_grad_(needs_gradient))
        tensor.grad = None
        if is_adopted(tensor):
            function(tensor, local)
            vars(tensor).pop("_value")
            vars(tensor).pop("_is_param", None)
            tensor.__class__ = type(made)
        else:
            torch.utils.swap_tensors(tensor, made)
    if gradient is not None:
        tensor.grad = gradient.cpu()


def become(tensor: torch.Tensor, new: torch.Tensor) -> bool:
    """Say whether ``new`` can be the data of ``tensor``, which it is to become; PyTorch asks right before it does that.

    Raises:
        RuntimeError: It cannot, because gradients of its dtype do not exist.
    """
    if isinstance(tensor, LazyTensor):
        return isinstance(new, LazyTensor) or is_adopted(tensor)
    if not isinstance(new, LazyTensor) or type(tensor) not in _ORDINARY:
        return False
    if tensor.requires_grad and not (new.dtype.is_floating_point or new.dtype.is_complex):
        raise RuntimeError(f"data set to a tensor that requires gradients must be floating point or complex dtype, "
                           f"but got {new.dtype}")
    runtime.current().mixer.forget(tensor)
    adopted: Any = tensor
    with torch.no_grad():
        adopted._value = new.data._value  # type: ignore[attr-defined]  # a lazy tensor's data is lazy
    if isinstance(tensor, torch.nn.Parameter):
        adopted._is_param = True
    adopted.__class__ = LazyTensor
    return True
