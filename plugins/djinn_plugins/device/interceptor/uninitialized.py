"""Parameters and buffers of lazy modules, whose size is determined by the first forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import parameter
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from djinn.record.tensor import LazyTensor

_Mixin: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]  # missing in the stubs


class _Uninitialized(_Mixin):  # type: ignore[misc]  # as above
    """A tensor on the device without a size yet. ``materialize(shape)`` is PyTorch's, not `LazyTensor`'s."""

    cls_to_become = LazyTensor
    _allowed_methods = (*_Mixin._allowed_methods, torch.Tensor.requires_grad_)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls._allowed_methods:
            return LazyTensor.__torch_function__(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def data(self) -> Any:
        """See `LazyTensor.data`. A tensor that is moved to the CPU by assignment stays uninitialized there."""
        return LazyTensor.data.fget(self)  # type: ignore[attr-defined]  # a property

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        home = UninitializedParameter if isinstance(self, UninitializedParameter) else UninitializedBuffer
        LazyTensor.data.fset(self, new)  # type: ignore[attr-defined]  # a property
        if not isinstance(new, LazyTensor):
            self.__class__ = home  # type: ignore[assignment]  # it is no longer a lazy tensor

    def detach(self) -> Any:
        """Return the same without a gradient; PyTorch makes a parameter of it when a module moves."""
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = torch.Tensor.detach(self)
        made.__class__ = type(self)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = LazyTensor.__deepcopy__(self, memo)
        made.__class__ = type(self)
        return made


class _Parameter(_Uninitialized, UninitializedParameter, LazyTensor):  # type: ignore[misc]  # two ways to materialize
    pass


class _Buffer(_Uninitialized, UninitializedBuffer, LazyTensor):  # type: ignore[misc]  # as above
    pass


def keep_uninitialized(made: LazyTensor, source: torch.Tensor) -> None:
    """Keep a tensor without a size uninitialized after its move to the device."""
    if isinstance(source, _Mixin):
        made.__class__ = _Parameter if isinstance(source, UninitializedParameter) else _Buffer


def keep_uninitialized_at_home(made: Any, source: LazyTensor) -> Any:
    """As `keep_uninitialized`, for a buffer that is moved to the CPU; parameters are moved by assigning to `data`."""
    if isinstance(source, _Buffer):
        made.__class__ = UninitializedBuffer
    return made
