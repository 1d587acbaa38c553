"""``torch.cuda.FloatTensor``, ``torch.cuda.sparse.FloatTensor`` and their like.

Older scripts call them, name them, and check for them.
"""

from __future__ import annotations

from typing import Any

import torch

from djinn.record.tensor import LazyTensor
from djinn_plugins.device.accelerator.patches import Patches
from djinn_plugins.run.cuda.translation import remote_index

__all__ = ("replace",)

_DTYPES = {
    "BFloat16Tensor": torch.bfloat16, "BoolTensor": torch.bool, "ByteTensor": torch.uint8, "CharTensor": torch.int8,
    "DoubleTensor": torch.float64, "FloatTensor": torch.float32, "HalfTensor": torch.float16,
    "IntTensor": torch.int32, "LongTensor": torch.int64, "ShortTensor": torch.int16,
}
_PREFIX = "torch.cuda."


class _TensorType(type):
    """The class of the types: calling one makes a tensor, ``isinstance`` checks place and dtype."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.as_tensor(args[0], dtype=cls.dtype, device="cpu").to(remote_index(None), copy=True)
        size = args[0] if args and isinstance(args[0], torch.Size) else args
        return torch.empty(size or 0, dtype=cls.dtype, device=remote_index(None))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, LazyTensor) and instance.dtype == cls.dtype


class _SparseTensorType(_TensorType):
    """The class of the types of sparse tensors in the layout COO."""

    def __call__(cls, *args: Any) -> torch.Tensor:
        options: Any = {"dtype": cls.dtype, "device": remote_index(None), "check_invariants": False}
        if args and isinstance(args[0], torch.Tensor):
            return torch.sparse_coo_tensor(*args, **options)
        size = args[0] if args and isinstance(args[0], torch.Size) else args
        return torch.sparse_coo_tensor(size=size or (0,), **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return (isinstance(instance, torch.Tensor) and instance.layout is torch.sparse_coo
                and instance.dtype == cls.dtype and instance.device.type == remote_index(None).type)


def replace(patches: Patches) -> None:
    """Replace the types, and functions that take them, until the patches are closed."""
    types = {}
    for name, dtype in _DTYPES.items():
        types[name] = _TensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        patches.set(torch.cuda, name, types[name])
        if hasattr(torch.cuda.sparse, name):
            made = _SparseTensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda.sparse"})
            patches.set(torch.cuda.sparse, name, made)
    patches.set(torch.Tensor, "type", _type(torch.Tensor.type, types))
    patches.set(torch, "set_default_tensor_type", _set_default(torch.set_default_tensor_type, types))


def _named(given: Any, types: dict[str, Any]) -> Any:
    if isinstance(given, str) and given.startswith(_PREFIX):
        return types.get(given.removeprefix(_PREFIX), given)
    return given


def _type(original: Any, types: dict[str, Any]) -> Any:
    remote = f"torch.{remote_index(None).type}."

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """As ``torch.Tensor.type``; the types of CUDA are those of the remote device."""
        if dtype is None:
            name: str = original(self)
            return f"{_PREFIX}{name.removeprefix(remote)}" if name.startswith(remote) else name
        wanted = _named(dtype, types)
        if isinstance(wanted, _TensorType):
            return self.to(remote_index(None), wanted.dtype, non_blocking)
        return original(self, dtype, non_blocking, **kwargs)

    return type_


def _set_default(original: Any, types: dict[str, Any]) -> Any:
    def set_default_tensor_type(t: Any) -> None:
        """As ``torch.set_default_tensor_type``; the types of CUDA are those of the remote device."""
        wanted = _named(t, types)
        if not isinstance(wanted, _TensorType):
            original(t)
            return
        torch.set_default_dtype(wanted.dtype)
        torch.set_default_device(remote_index(None))

    return set_default_tensor_type
