"""``resize_`` of storages: programs such as FSDP free the memory of tensors, and allocate it again later.

All tensors in the storage get values in new memory, and stay the same tensors for programs and for autograd. While the
storage has no bytes, their values are one zero, repeated by strides of 0, so that nothing reads memory that is not
there; eager does not define what an operation reads then.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from djinn.errors import UnsupportedTensorError
from djinn.record.tensor import LazyTensor
from djinn.session import runtime

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("has_no_bytes", "reach_bytes", "resized")

ELEMENT_BYTES = 16
"""Size of the largest element, that of ``complex128``."""
_without_functions = torch._C.DisableTorchFunctionSubclass
_empty: weakref.WeakKeyDictionary[Session, set[int]] = weakref.WeakKeyDictionary()
"""By session: the numbers of storages without bytes."""


def has_no_bytes(tensor: LazyTensor) -> bool:
    """Whether the storage of a tensor was resized to 0 bytes."""
    return bool(_empty) and tensor._value.slot.storage in _empty.get(runtime.current(), ())


def resized(tensor: LazyTensor, before_bytes: int, size_bytes: int) -> LazyTensor:
    """Resize the storage of a tensor, and return a tensor in it.

    Its bytes beyond the previous size are undefined.

    Args:
        tensor: Lies in the storage.
        before_bytes: The present size.
        size_bytes: The new one.

    Raises:
        UnsupportedTensorError: Some bytes would be left, but fewer than a tensor has.
    """
    if size_bytes == before_bytes:
        return tensor
    session, number = runtime.current(), tensor._value.slot.storage
    with session.lock, _without_functions(), torch.no_grad():
        there = _tensors_in(session, number)
        needed = (reach_bytes(item.size(), item.stride(), int(item.storage_offset()), item.dtype.itemsize)
                  for item in there)
        if size_bytes and any(each > size_bytes for each in needed):
            raise UnsupportedTensorError(
                f"A storage with tensors of more than {size_bytes} bytes cannot be resized to that.",
                hint="Resize it to 0 to free its memory, or drop the tensors.")
        made: Any = torch.zeros(size_bytes or ELEMENT_BYTES, dtype=torch.uint8, device=session.device)
        # It stays the same storage for those that tell storages apart, such as weak references.
        made._value.slot.storage = number
        if before_bytes and size_bytes:
            count = min(before_bytes, size_bytes) // tensor.dtype.itemsize
            made.view(tensor.dtype)[:count].copy_(tensor.detach().as_strided((count,), (1,), 0))
        values = [_placed(item, made, is_empty=not size_bytes)._value for item in there]
        for item, value in zip(there, values, strict=True):
            item._value = value
        empty = _empty.setdefault(session, set())
        (empty.discard if size_bytes else empty.add)(number)
    return made if size_bytes else tensor


def _tensors_in(session: Session, number: int) -> list[LazyTensor]:
    """List all tensors in a storage, those that autograd has saved included."""
    kinds = {LazyTensor}
    for kind in (waiting := [LazyTensor]):
        waiting += kind.__subclasses__()
        kinds.add(kind)
    # Objects refer to their classes. Python finds those that do faster than it lists all objects.
    tensors = [item for item in gc.get_referrers(*kinds) if type(item) in kinds]
    values = [(item, vars(item).get("_value")) for item in tensors]
    return [item for item, value in values if value is not None and value.slot.storage == number
            and value.released == session.recorder.released]


def reach_bytes(size: Sequence[int], stride: Sequence[int], offset: int, itemsize: int) -> int:
    """Return how many bytes a storage must have for a tensor of that layout, in elements."""
    if 0 in size:
        return 0
    reach = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return (offset + reach + 1) * itemsize


def _placed(tensor: LazyTensor, whole: torch.Tensor, *, is_empty: bool) -> LazyTensor:
    """Return a tensor in new memory that is laid out as another one."""
    itemsize, size = tensor.dtype.itemsize, tensor.size()
    elements = whole[:whole.numel() // itemsize * itemsize].view(tensor.dtype)
    made = (elements.as_strided(size, (0,) * len(size), 0) if is_empty
            else elements.as_strided(size, tensor.stride(), tensor.storage_offset()))
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made  # type: ignore[return-value]  # lazy, as the whole
