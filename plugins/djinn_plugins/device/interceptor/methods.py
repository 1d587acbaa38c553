"""Methods of lazy tensors that Python calls directly.

A method of a tensor subclass passes PyTorch's argument parser, which gathers the classes involved, only to call
``__torch_function__``. For the most frequent methods, the class has Python methods instead that call it at once; and
operators between two tensors, or a tensor and a number, look for their shortcut before that. With a function mode, or
an argument that PyTorch itself would have to look at, they call PyTorch's method, so the effect is the same.

``__getitem__`` is none of them: a class that has one in Python is a sequence to C, which an ordinary tensor is not, and
PyTorch would take a tensor for a list of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from types import NoneType
from typing import Any

import torch

from djinn.record.dispatcher import pending_errors
from djinn.record.tensor import LazyTensor
from djinn_plugins.device.interceptor import fast_path, functions

_OPERATORS = {"__add__": "add", "__sub__": "sub", "__mul__": "mul", "__truediv__": "div", "__matmul__": "matmul",
              **{name: name for name in ("add", "sub", "mul", "div", "matmul", "mm")}}
"""Methods with one argument that are mostly recorded by their shortcut, and the methods that PyTorch reports."""
_VIEWS = (
    "view reshape permute transpose unsqueeze squeeze expand contiguous flatten split chunk select narrow t".split())
"""Methods with numbers as arguments."""
_PLAIN = frozenset((int, bool, str, NoneType, tuple, list, torch.Size, torch.dtype, torch.memory_format))
"""Classes of arguments that do not take part in choosing ``__torch_function__``."""

_modes = torch._C._len_torch_function_stack
_types = (LazyTensor,)
_handle = LazyTensor.__torch_function__
_call_plainly = torch._C._disabled_torch_function_impl


def install() -> None:
    """Give lazy tensors the methods; once in a process."""
    for name, reported in _OPERATORS.items():
        setattr(LazyTensor, name, _operator(getattr(torch.Tensor, name), getattr(torch.Tensor, reported)))
    for name in _VIEWS:
        setattr(LazyTensor, name, _view(getattr(torch.Tensor, name)))


def _operator(plain: Callable[..., Any], reported: Callable[..., Any]) -> Callable[..., Any]:
    recorded = fast_path.recorded

    @functools.wraps(plain)
    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or _modes():
            return plain(self, *args, **kwargs)
        other = args[0]
        kind = type(other)
        if (kind is not LazyTensor and kind is not float and kind is not int) or type(self) is not LazyTensor:
            return plain(self, other)
        made = recorded(reported, self, other)
        return _handle(reported, _types, (self, other)) if made is None else made

    return method


def _view(plain: Callable[..., Any]) -> Callable[..., Any]:
    # Without a handler, there is nothing between this method and PyTorch's.
    has_handler = plain in functions.FUNCTIONS

    @functools.wraps(plain)
    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        if (
            type(self) is not LazyTensor
            or not _PLAIN.issuperset(map(type, args))
            or (kwargs and not _PLAIN.issuperset(map(type, kwargs.values())))
            or _modes()
        ):
            return plain(self, *args, **kwargs)
        if has_handler:
            return _handle(plain, _types, (self, *args), kwargs)
        try:
            return _call_plainly(plain, _types, (self, *args), kwargs)
        except Exception:  # noqa: BLE001  # raised again, as the error that it is to be
            # These methods only read, so a second call does no harm.
            return _handle(plain, _types, (self, *args), kwargs)
        except BaseException:
            pending_errors.pop(get_ident(), None)
            raise

    return method
