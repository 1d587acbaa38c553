"""Runs code eagerly and on the remote device: sends the arguments there, and compares the outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from djinn.record.tensor import LazyTensor
from djinn_conformance.assertions import (
    Tolerance,
    expect_equal,
    expect_same_metadata,
    expect_same_tensor,
    expect_same_value,
    violated,
)
from djinn_plugins.common.sparse.rebuilding import components_of
from djinn_plugins.device.sparse.tensor import LazySparse

__all__ = ("compare", "copies", "sent")


@attrs.frozen
class _Copier:
    """Copies tensors with their storages, so that shared memory stays shared."""

    device: torch.device
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = attrs.field(factory=dict)
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict)
    """By identity: the original, which is kept alive so that its identity stays unique, and the copy."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.done.get(id(tensor))
        if found is None:
            found = self.done[id(tensor)] = (tensor, self._copied(tensor))
        return found[1]

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            return tensor
        with torch.no_grad():
            made = self._dense(tensor.detach()) if tensor.layout is torch.strided and not tensor.is_quantized else (
                tensor.detach().to(self.device, copy=True))
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _dense(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_conj():
            return self._dense(tensor.conj()).conj()
        if tensor.is_neg():
            return self._dense(torch._neg_view(tensor))._neg_view()
        storage = tensor.untyped_storage()
        key = (storage.data_ptr() or id(tensor), tensor.dtype)
        if key not in self.storages:
            length = storage.nbytes() // tensor.element_size()
            self.storages[key] = tensor.as_strided((length,), (1,), 0).to(self.device, copy=True)
        return self.storages[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def sent(item: Any, device: torch.device) -> Any:
    """Copy all data in ``item`` to a device, preserving strides, aliases and ``requires_grad``.

    The CPU itself, as a device or by name, is replaced by ``device``. Objects other than tensors, devices, lists,
    tuples and dictionaries stay as they are.
    """
    return _mapped(item, _Copier(device).copy, device)


def copies(item: Any) -> Any:
    """Copy all data in ``item`` to new tensors on the CPU, as `sent` does to another device."""
    return sent(item, torch.device("cpu"))


def _mapped(item: Any, copy: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return copy(item)
    if isinstance(item, torch.device) and item.type == "cpu":
        return device
    if isinstance(item, str):
        return str(device) if item == "cpu" else item
    if isinstance(item, torch.Size):
        return item
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_mapped(member, copy, device) for member in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(member, copy, device) for member in item)
    if isinstance(item, dict):
        return {name: _mapped(member, copy, device) for name, member in item.items()}
    return item


def compare(
    got: Any, wanted: Any, what: str, where: str, *, tolerance: Tolerance | None = None, values: bool = True
) -> None:
    """Check that an outcome on the remote device equals eager's.

    Args:
        got: The outcome, with lazy tensors.
        wanted: Eager's outcome, with tensors on the CPU, in the same nesting.
        what: The compared object, for the message.
        where: The case, for the message.
        tolerance: The tolerance, if bits may differ.
        values: Whether to compare elements; otherwise only metadata.
    """
    __tracebackhide__ = True
    if isinstance(wanted, torch.Tensor):
        _compare_tensors(got, wanted, what, where, tolerance, values)
    elif isinstance(wanted, (list, tuple)):
        expect_equal(type(got).__name__.replace("LazyTuple", "tuple"), type(wanted).__name__, f"type of {what}", where)
        expect_equal(len(got), len(wanted), f"length of {what}", where)
        for index, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            compare(mine, theirs, f"{what}[{index}]", where, tolerance=tolerance, values=values)
    elif isinstance(wanted, Mapping):
        expect_equal(list(got), list(wanted), f"names in {what}", where)
        for name, theirs in wanted.items():
            compare(got[name], theirs, f"{what}[{name!r}]", where, tolerance=tolerance, values=values)
    elif values and not isinstance(wanted, torch.device):
        expect_same_value(got, wanted, what, where)


def _compare_tensors(
    got: Any, wanted: torch.Tensor, what: str, where: str, tolerance: Tolerance | None, values: bool
) -> None:
    __tracebackhide__ = True
    if not isinstance(got, torch.Tensor):
        violated(what, got=repr(got), wanted="a tensor", where=where)
    if wanted.layout is not torch.strided and type(got) is LazySparse:
        _compare_sparse(got, wanted, what, where, tolerance, values)
        return
    if not isinstance(got, LazyTensor):
        violated(f"type of {what}", got=type(got).__name__, wanted="a lazy tensor", where=where)
    expect_same_metadata(got, wanted, what, where)
    expect_equal(got.requires_grad, wanted.requires_grad, f"requires_grad of {what}", where)
    expect_equal(got.is_leaf, wanted.is_leaf, f"is_leaf of {what}", where)
    if values:
        expect_same_tensor(got.detach().cpu(), wanted.detach(), what, where, tolerance)


def _compare_sparse(
    got: torch.Tensor, wanted: torch.Tensor, what: str, where: str, tolerance: Tolerance | None, values: bool
) -> None:
    __tracebackhide__ = True
    for name in ("layout", "shape", "dtype", "requires_grad", "is_leaf"):
        expect_equal(getattr(got, name), getattr(wanted, name), f"{name} of {what}", where)
    home = got.detach().cpu()
    if wanted.layout is torch.sparse_coo:
        expect_equal(got.is_coalesced(), wanted.is_coalesced(), f"is_coalesced of {what}", where)
    for index, (mine, theirs) in enumerate(zip(components_of(home), components_of(wanted.detach()), strict=True)):
        expect_equal(mine.shape, theirs.shape, f"size of component {index} of {what}", where)
        if values:
            expect_same_tensor(mine.contiguous(), theirs.contiguous(), f"component {index} of {what}", where, tolerance)
