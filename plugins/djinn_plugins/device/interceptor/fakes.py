"""Fake tensors of the device: metadata without data, made by ``FakeTensorMode``, ``torch.export`` and ``make_fx``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.device.interceptor.subclasses import can_be_lazy

_PYTORCHS_OWN = (torch._C.DispatchKey.CompositeExplicitAutograd,
                 torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional, torch._C.DispatchKey.Meta)
"""Where PyTorch registers kernels that only use metadata."""


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the device has only metadata: a fake one, or one whose class keeps its data in others.

    A tensor of such a class arrives here only while dispatch to its class is switched off.
    """
    return not isinstance(tensor, LazyTensor) and (
        tensor.is_meta or (not can_be_lazy(type(tensor)) and tensor.device.type == devices.logical_device().type))


def leave_fakes(find: Callable[[], Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel of the device leave tensors without data to PyTorch's own kernel.

    Inside, a fake tensor is a meta tensor with this device's dispatch key.

    Args:
        find: Returns the operator; called when it is needed.
        kernel: The device's kernel.
    """

    def dispatch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not has_no_data(tensor):
            return kernel(tensor, *args, **kwargs)
        operator = find()
        own = next(key for key in _PYTORCHS_OWN
                   if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key.name))
        made = operator._op_dk(own, tensor, *args, **kwargs)
        if tensor.is_meta and operator is torch.ops.aten.detach.default:
            # `FakeTensor` detaches what it wraps, and takes over the result's Python object, which a kernel in Python
            # cannot help making.
            made.__class__ = FakeTensor
        return made

    return dispatch


def register() -> None:
    """Make ``FakeTensorMode`` treat lazy tensors as it treats ordinary ones, instead of as an unknown subclass."""
    is_unknown = fake_tensor._check_for_subclass_arg
    fake_tensor._check_for_subclass_arg = lambda x: type(x) is not LazyTensor and is_unknown(x)
