"""Lazy tensors that become ordinary ones in place while views, graphs or weak references refer to them.

PyTorch can exchange two tensors only if nothing else refers to them. Otherwise the data is assigned: the tensor then
has its storage here, and is a CPU tensor to all of PyTorch, but it keeps the Python dispatch key, which PyTorch cannot
remove. So its class handles each operation by executing it on an alias without that key.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from djinn.record.tensor import LazyTensor

__all__ = ("BroughtHome", "bring_home", "plain")

_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot)
_without_functions = torch._C.DisableTorchFunctionSubclass
_METADATA = frozenset({"set_", "resize_", "resize_as_"})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor with the same storage, outside autograd."""
    with _without_functions(), torch._C._ExcludeDispatchKeyGuard(_PYTHON), torch.no_grad():
        return torch.Tensor.detach(tensor)


class BroughtHome(torch.Tensor):
    """A CPU tensor that was a lazy one."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """Create an ordinary parameter, as ``type(parameter)(data, requires_grad)`` does for others."""
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method in use, and without one in the stubs
            cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return NotImplemented  # the lazy tensor that becomes its data answers
        named = kwargs or {}
        if torch.Tag.inplace_view in func.tags or func.overloadpacket.__name__ in _METADATA:
            with torch._C._ExcludeDispatchKeyGuard(_PYTHON):
                return func(*args, **named)
        return executed(func, args, named)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped there
        return repr(_ordinary(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_ordinary(self), memo)
        return memo[id(self)]

    def tolist(self) -> Any:
        """Return the data as nested lists."""
        return plain(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the data as an array that shares its memory.

        Raises:
            RuntimeError: The tensor requires a gradient and ``force`` is not set, as for any tensor.
        """
        return (plain(self) if force else plain(self).requires_grad_(self.requires_grad)).numpy()

    def __array__(self, dtype: Any = None) -> Any:
        made = self.numpy()
        return made if dtype is None else made.astype(dtype, copy=False)


def executed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Execute an operation on ordinary aliases of its arguments; what it wrote is returned as it was given."""
    given: dict[int, torch.Tensor] = {}

    def unwrapped(tensor: BroughtHome) -> torch.Tensor:
        alias = plain(tensor)
        given[id(alias)] = tensor
        return alias

    aliases = tree_map_only(BroughtHome, unwrapped, (args, kwargs))
    made = func(*aliases[0], **aliases[1])
    return tree_map_only(torch.Tensor, lambda tensor: given.get(id(tensor), tensor), made)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    alias = plain(tensor)
    if getattr(tensor, "_is_param", False):
        alias = torch.nn.Parameter(alias, tensor.requires_grad)
    else:
        alias.requires_grad_(tensor.requires_grad)
    vars(alias).update({name: item for name, item in vars(tensor).items() if name != "_is_param"})
    return alias


def bring_home(tensor: LazyTensor, assign: Callable[[torch.Tensor, torch.Tensor], None], local: torch.Tensor) -> None:
    """Assign ``local`` as the data of a lazy tensor, which becomes a `BroughtHome`.

    Args:
        tensor: The tensor.
        assign: PyTorch's own assignment.
        local: An ordinary tensor.
    """
    assign(tensor, local)
    vars(tensor).pop("_value")
    tensor.__class__ = BroughtHome  # type: ignore[assignment]  # it is no lazy tensor any more
