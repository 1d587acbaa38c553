"""Where values lie in a storage, and what a write to one of them changes in another one.

The client's own tensors lie elsewhere in memory than the executor's. So places are counted from a tensor that is laid
out here as it is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from djinn.ir.spec import TensorSpec

__all__ = ("NotPlacedError", "placed", "restrided", "seen_through", "shares_elements", "surrounds",
           "usual_strides")


class NotPlacedError(Exception):
    """What lies there is not known."""


def restrided(
    base: TensorSpec, tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """Return a view of a storage, for ``aten::as_strided``.

    Args:
        base: Metadata, at the executor, of a tensor with this storage.
        tensor: That tensor, here.
        size: Size of the view.
        stride: Its strides.
        offset: Position of its first element in the storage.

    Raises:
        NotPlacedError: It may reach beyond that tensor.
    """
    offset = base.storage_offset if offset is None else offset
    first, last = _extent(base)
    if not _is_contiguous(base) or tensor.size() != base.size or tensor.stride() != base.stride or (
            offset < first or _last(size, stride, offset) > last):
        raise NotPlacedError
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset - first)


def placed(spec: TensorSpec, base: TensorSpec, operands: Sequence[Any]) -> list[torch.Tensor]:
    """Return a tensor that lies in the storage of another one.

    Raises:
        NotPlacedError: It may reach beyond that tensor.
    """
    return [restrided(base, operands[0], spec.size, spec.stride, spec.storage_offset)]


def seen_through(other: TensorSpec, written: TensorSpec, operands: Sequence[Any]) -> list[torch.Tensor]:
    """Return what a value is after another one of its storage was written.

    Args:
        other: Metadata of the value.
        written: Metadata of the other one.
        operands: The value before, and the other one after the write.

    Raises:
        NotPlacedError: It is not certain.
    """
    before, after = operands
    if other.dtype is not written.dtype:
        raise NotPlacedError
    (first, last), (start, end) = _extent(other), _extent(written)
    if start <= first and last <= end and _is_contiguous(written):
        return [restrided(written, after, other.size, other.stride, other.storage_offset)]
    copy = before.clone()
    restrided(other, copy, written.size, written.stride, written.storage_offset).copy_(after)
    return [copy]


def shares_elements(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    """Whether two values of a storage may have elements in common."""
    if one is None or other is None or one.dtype is not other.dtype:
        return True
    (first, last), (start, end) = _extent(one), _extent(other)
    return first <= end and start <= last


def surrounds(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    """Whether a value of a storage has all elements around another one."""
    if one is None or other is None or one.dtype is not other.dtype or not _is_contiguous(one):
        return False
    (first, last), (start, end) = _extent(one), _extent(other)
    return first <= start and end <= last


def _extent(spec: TensorSpec) -> tuple[int, int]:
    return spec.storage_offset, _last(spec.size, spec.stride, spec.storage_offset)


def _last(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Return the position of the last element; the one before the first, if there is none."""
    if 0 in size:
        return offset - 1
    return offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


def usual_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(size[dim + 1:]) for dim in range(len(size)))


def _is_contiguous(spec: TensorSpec) -> bool:
    return all(extent == 1 or step == usual
               for extent, step, usual in zip(spec.size, spec.stride, usual_strides(spec.size), strict=True))
