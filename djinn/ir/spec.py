"""Interned metadata of tensors whose data is remote."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import attrs
import torch


def _layout(spec: TensorSpec) -> dict[str, Any]:
    usual = tuple(math.prod(spec.size[dim + 1:]) for dim in range(len(spec.size)))
    is_usual = spec.numel and not spec.storage_offset and spec.stride == usual
    placed = {} if is_usual else {"strides": spec.stride, "storage_offset": spec.storage_offset}
    return {"dtype": spec.dtype, "device": spec.device, **placed}


@attrs.define(slots=True, eq=False, frozen=True, weakref_slot=True)
class TensorSpec:
    """Metadata of one strided tensor.

    Instances come from a `SpecTable` and are compared by identity: within a session, equal metadata is the same
    object, which makes a spec a cheap and exact dictionary key.
    """

    size: torch.Size
    """Size of each dimension."""
    stride: tuple[int, ...]
    """Step of each dimension, in elements."""
    storage_offset: int
    """Position of the first element in the storage, in elements."""
    dtype: torch.dtype
    """Type of an element."""
    device: torch.device
    """Logical device, for example ``remote_accelerator:0``."""
    layout: dict[str, Any] = attrs.field(init=False, repr=False, default=attrs.Factory(_layout, takes_self=True))
    """What PyTorch needs to know of it beside the size; strides and offset only where they are not the usual ones."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements themselves."""
        return self.numel * self.dtype.itemsize

    @property
    def reach_bytes(self) -> int:
        """Bytes from the beginning of the storage to the last element; expanded dimensions count once."""
        if not self.numel:
            return 0
        last = sum((extent - 1) * step for extent, step in zip(self.size, self.stride, strict=True))
        return (self.storage_offset + last + 1) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"TensorSpec({tuple(self.size)}, {self.dtype}, stride={self.stride}, offset={self.storage_offset})"


class SpecTable:
    """The specs of one session.

    A spec lives as long as something refers to it. A spec of another session is never found here; so tensors of a
    closed session are recognized without a check in every operation.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[object, ...], TensorSpec] = weakref.WeakValueDictionary()

    def __contains__(self, spec: TensorSpec) -> bool:
        return self._known.get(_key(spec)) is spec

    def intern(
        self,
        size: torch.Size,
        stride: tuple[int, ...],
        storage_offset: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TensorSpec:
        """Return the unique spec with this metadata."""
        made = TensorSpec(size, stride, storage_offset, dtype, device)
        return self._known.setdefault(_key(made), made)

    def of(self, tensor: torch.Tensor, device: torch.device) -> TensorSpec:
        """Return the spec of a copy of a dense tensor on ``device``."""
        return self.intern(tensor.size(), tensor.stride(), 0, tensor.dtype, device)


def tensors_in(items: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors in nested lists of arguments, in order."""
    found: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += tensors_in(item)
    return found


def _key(spec: TensorSpec) -> tuple[object, ...]:
    return (spec.size, spec.stride, spec.storage_offset, spec.dtype, spec.device)
