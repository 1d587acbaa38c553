"""Subclasses of tensors that other libraries define, on the device: images with metadata, parameters on a manifold.

PyTorch makes a tensor an object of a class only if it is no object of another class yet, which a lazy tensor always is.
So each such class has a counterpart that derives from it and from `LazyTensor`, and a lazy tensor becomes an object of
that counterpart. A class that defines ``__torch_dispatch__`` has none: its objects contain other tensors.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import get_default_nowrap_functions

from djinn.record.tensor import LazyTensor
from djinn_plugins.common.once import once

__all__ = ("can_be_lazy", "install", "lazy_class", "mark_made", "ordinary_class")

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_UNINITIALIZED = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
"""They change their class later."""
_without_functions = torch._C.DisableTorchFunctionSubclass
_make_ordinary = torch.Tensor._make_subclass
_OF_ANY_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__"}
_MADE = "_is_made_by_pytorch"
"""Attribute of a parameter that PyTorch makes of one that moves, and whose constructor it therefore calls."""


class LazySubclass(LazyTensor):
    """What the counterparts have in common: results of operations are of the same class, as in PyTorch."""

    ordinary: type
    """The class of the library."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)
        if func in get_default_nowrap_functions():
            return made
        return _converted(made, cls, (*args, *(kwargs or {}).values()))

    @property
    def data(self) -> torch.Tensor:
        """As that of a lazy tensor."""
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        LazyTensor.data.__set__(self, new)  # type: ignore[attr-defined]  # a property


def can_be_lazy(cls: type) -> bool:
    """Whether tensors of a class can be on the device: it is PyTorch's own, or leaves operators to PyTorch."""
    return (cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]  # a tensor's class
            and not issubclass(cls, _UNINITIALIZED))


def lazy_class(cls: type) -> type:
    """Return the class of the lazy tensors that are tensors of ``cls`` to their program."""
    if cls in _PLAIN or issubclass(cls, LazyTensor):
        return LazyTensor if cls in _PLAIN else cls
    return _counterpart(cls)


@once
def _counterpart(cls: type) -> type:
    libraries = [base for base in cls.__mro__ if base not in LazyTensor.__mro__ and base not in _PLAIN]
    own = {name for base in libraries for name in vars(base)}
    # What a parameter does as an ordinary tensor; what the library's class does is left as it is.
    hidden = {name for base in cls.__mro__ if base in _PLAIN[1:] for name in vars(base)} - own - _OF_ANY_CLASS
    members = {name: member for base in (LazyTensor, LazySubclass) for name, member in vars(base).items()
               if name in hidden}
    members |= {"ordinary": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if "__init__" in own:
        members["__init__"] = _initialize
    return types.new_class(cls.__name__, (cls, LazySubclass), {}, lambda body: body.update(members))


def _initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    if not vars(self).pop(_MADE, False):
        self.ordinary.__init__(self, *args, **kwargs)


def mark_made(tensor: LazyTensor) -> None:
    """Note that PyTorch's call of the constructor is not the library's."""
    if vars(type(tensor)).get("__init__") is _initialize:
        vars(tensor)[_MADE] = True


def ordinary_class(cls: type) -> type | None:
    """Return the class of a library that has this counterpart."""
    return cls.ordinary if issubclass(cls, LazySubclass) else None


def install() -> None:
    """Make lazy tensors have the method ``as_subclass``, and constructors of subclasses accept lazy tensors."""
    changed: Any = LazyTensor
    changed.as_subclass = _as_subclass
    changed = torch.Tensor
    changed._make_subclass = staticmethod(_make_subclass)


def _as_subclass(self: LazyTensor, cls: Any) -> Any:
    """Return the same tensor, as one of ``cls``."""
    with _without_functions():
        if not can_be_lazy(cls) and not issubclass(cls, LazyTensor):
            return torch.Tensor.as_subclass(self, cls)
        return _made(torch.ops.aten.alias.default(self), cls)


def _make_subclass(*args: Any, **named: Any) -> Any:
    """As the original; the tensor may be lazy. Dynamo compares signatures, and accepts this one."""
    cls, data = args[:2]
    if isinstance(data, LazyTensor) and can_be_lazy(cls):
        needs_gradient = (args[2:] or (named.get("require_grad", False),))[0]
        with _without_functions():
            return _made(torch.Tensor.detach(data).requires_grad_(needs_gradient), cls)
    return _make_ordinary(ordinary_class(cls) or cls, *args[1:], **named)


def _made(tensor: Any, cls: type) -> Any:
    if issubclass(cls, torch.nn.Parameter):
        tensor._is_param = True
    return _become(tensor, lazy_class(cls))


def _become(tensor: Any, cls: type) -> Any:
    tensor.__class__ = cls
    return tensor


def _converted(made: Any, cls: Any, given: Sequence[Any]) -> Any:
    """Return the result of a function as PyTorch's default ``__torch_function__`` returns it."""
    if isinstance(made, (tuple, list)):
        return type(made)(_converted(one, cls, given) for one in made)
    if type(made) is torch.Tensor:
        return made.as_subclass(cls.ordinary)
    if type(made) is not LazyTensor:
        return made
    return _as_subclass(made, cls) if any(made is item for item in given) else _become(made, cls)
