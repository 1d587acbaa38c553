"""Ordinary tensors that become lazy in place, because their ``data`` was assigned.

PyTorch allows assigning an accelerator's tensor to ``data`` of a CPU tensor, even with views and graphs, if it
considers the two compatible; it asks by an operator, which is implemented here. The tensor is then on this device and
of class `LazyTensor`, but lacks the Python dispatch key, which PyTorch sets only on new tensors. Therefore its
operations reach the device's kernels instead. PyTorch has device-independent kernels that only use metadata, so these
operators need kernels here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from djinn.record.tensor import LazyTensor
from djinn.session import runtime
from djinn_plugins.device.interceptor import fakes, storage_references
from djinn_plugins.device.interceptor.brought_home import BroughtHome, bring_home
from djinn_plugins.device.interceptor.subclasses import can_be_lazy, lazy_class, mark_made, ordinary_class

_ASKED = (
    "alias", "as_strided_", "clone", "copy_", "detach", "diagonal", "expand", "permute", "resize_as_", "select.int",
    "slice.Tensor", "split.Tensor", "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "squeeze_",
    "squeeze_.dim", "squeeze_.dims", "t", "t_", "transpose.int", "transpose_", "unbind.int", "unsqueeze", "unsqueeze_",
    "view.dtype", "_conj", "_neg_view",
)
"""Operators that PyTorch executes on any device with its own kernels."""

_OF_METADATA = ("as_strided", "set_.source_Storage_storage_offset", "set_.source_Tensor", "unfold", "view",
                "view_as_complex", "view_as_real")
"""Views for which each device has a kernel; tensors without data get that of the meta device.

The kernel for all other operators is not called for tensors with the Python dispatch key, while that key is off.
"""

_arrivals: set[int] = set()
"""Lazy tensors whose data is being assigned an ordinary tensor."""


def register(
    library: torch.library.Library, kernel: Callable[[str], Callable[..., Any]], operator: Callable[[str], Any]
) -> None:
    """Register the kernels; ``kernel`` makes that of an operator that is simply recorded, ``operator`` finds it."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("_has_compatible_shallow_copy_type", become, key)
    for name in (*_ASKED, *_OF_METADATA):
        library.impl(name, fakes.leave_fakes(partial(operator, name), kernel(name)), "PrivateUse1")


def can_be_swapped(tensor: torch.Tensor) -> bool:
    """Whether no object in PyTorch itself, such as a view or a graph, refers to the tensor."""
    return _count_uses(tensor) == 1 and not isinstance(tensor, LazyTensor) and not _is_profiled()


def _is_profiled() -> bool:
    """Whether a profiler runs: if it notes shapes, it refers to each tensor weakly, which nothing else shows."""
    return torch._C._autograd._profiler_enabled()


def _count_uses(tensor: torch.Tensor) -> int:
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]  # missing from the stub


def is_adopted(tensor: torch.Tensor) -> bool:
    """Whether the tensor was an ordinary one before its data was assigned."""
    return not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def hand_over_attributes(tensor: torch.Tensor, new: LazyTensor) -> None:
    """Give a parameter's class, and what others have attached to it, to the one that PyTorch will make of ``new``.

    PyTorch makes it by ``new.detach()``.
    """
    attached = _attached(tensor)
    if can_be_lazy(type(tensor)):
        new.__class__ = lazy_class(type(tensor))
    if attached or type(new) is not LazyTensor:
        new.detach = partial(_detached, weakref.ref(new), attached)  # type: ignore[method-assign]  # of this tensor alone


def _detached(of: weakref.ref[LazyTensor], attached: dict[str, Any]) -> Any:
    new: Any = of()  # alive: it is the caller's
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = LazyTensor.detach(new)
    made.__class__ = type(new)
    mark_made(made)
    vars(made).update(attached)
    return made


def _attached(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: item for name, item in vars(tensor).items() if name not in storage_references.OWN_ATTRIBUTES}


def move_home(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Convert a lazy tensor, in place, to the ordinary tensor that is assigned to its ``data``.

    Raises:
        RuntimeError: That one is on the meta device.
    """
    tensor, new = args
    if new.device.type == "meta":
        raise RuntimeError("Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have "
                           "incompatible tensor type.")
    with torch._C.DisableTorchFunctionSubclass():
        needs_gradient, gradient = tensor.requires_grad, tensor.grad
        # Before anything changes, so that the gradient is found in its module and fetched together with the others.
        local_gradient = None if gradient is None else gradient.cpu()
        local = new.detach()
        made = (torch.nn.Parameter(local, needs_gradient) if getattr(tensor, "_is_param", False)
                else local.requires_grad_(needs_gradient))
        made.__class__ = ordinary_class(type(tensor)) or type(made)
        tensor.grad = None
        if is_adopted(tensor):
            function(tensor, local)
            for name in storage_references.OWN_ATTRIBUTES:
                vars(tensor).pop(name, None)
            tensor.__class__ = type(made)
        elif tensor._use_count() > 1 or weakref.getweakrefs(tensor) or _is_profiled():
            _arrivals.add(id(tensor))
            try:
                bring_home(tensor, function, local)
            finally:
                _arrivals.discard(id(tensor))
        else:
            vars(made).update(_attached(tensor))
            torch.utils.swap_tensors(tensor, made)
    if isinstance(gradient, LazyTensor) and not weakref.getweakrefs(gradient) and (
            _count_uses(gradient) == 1 and not _is_profiled()):
        # It stays the same object, as in eager, and those who hold it need not fetch it again.
        torch.utils.swap_tensors(gradient, local_gradient)
        tensor.grad = gradient
    elif gradient is not None:
        tensor.grad = local_gradient


def become(tensor: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether ``new`` can become the data of ``tensor``; PyTorch asks right before the assignment.

    Raises:
        RuntimeError: It cannot, because its dtype does not support gradients.
    """
    if isinstance(tensor, LazyTensor):
        return isinstance(new, LazyTensor) or is_adopted(tensor) or id(tensor) in _arrivals
    if not isinstance(new, LazyTensor) or not (can_be_lazy(type(tensor)) or type(tensor) is BroughtHome):
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
    adopted.__class__ = LazyTensor if type(tensor) is BroughtHome else lazy_class(type(tensor))
    return True
