"""Constructors of sparse tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from djinn.errors import UnsupportedTensorError
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.sparse.forms import LAYOUTS
from djinn_plugins.common.sparse.rebuilding import components_of
from djinn_plugins.device.sparse.tensor import LazySparse, made_of

__all__ = ("HANDLERS", "MAKERS", "refuse", "uploaded")

aten = torch.ops.aten
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def refuse(name: str) -> NoReturn:
    """Say that something has no remote form.

    Raises:
        UnsupportedTensorError: Always.
    """
    raise UnsupportedTensorError(f"{name} on a sparse tensor has no remote form.",
                                 hint="Convert it with to_dense(), or use .cpu() and run this part locally.")


def uploaded(tensor: torch.Tensor, device: Any = None) -> LazySparse:
    """Copy an ordinary sparse tensor to the device."""
    session = devices.current_session()
    if tensor.layout not in LAYOUTS.values():
        refuse(f"The layout {tensor.layout}")
    target = None if device is None else devices.checked_device(device)
    parts = [session.upload(part, target) for part in components_of(tensor.detach())]
    is_unique = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    return made_of(tensor.layout, parts, tensor.shape, is_unique=is_unique)


def _coo(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazySparse:
    _, _, size, indices, values = args
    parts = [item if isinstance(item, LazyTensor) else devices.current_session().upload(item)
             for item in (indices, values)]
    return made_of(torch.sparse_coo, parts, size, is_unique=bool(kwargs.get("is_coalesced")))


def _compressed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazySparse:
    *parts, size = args
    session = devices.current_session()
    parts = [item if isinstance(item, LazyTensor) else session.upload(item) for item in parts]
    return made_of(kwargs["layout"], parts, size)


def _compressed_unsized(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazySparse:
    """Make a compressed tensor with the size that the indices imply; waits for the largest index.

    Source:
        ``_estimate_sparse_compressed_tensor_size`` in aten/src/ATen/native/sparse/SparseTensor.cpp.
    """
    compressed, plain, values = args
    layout, batch = kwargs["layout"], compressed.shape[:-1]
    has_blocks = layout in _BLOCKED
    begin = len(batch) + 1
    block = values.shape[begin:begin + 2] if has_blocks else (1, 1)
    is_by_rows = layout in (torch.sparse_csr, torch.sparse_bsr)
    along, across = (block[0], block[1]) if is_by_rows else (block[1], block[0])
    extents = ((compressed.shape[-1] - 1) * along, (int(plain.max()) + 1 if plain.numel() else 0) * across)
    matrix = extents if is_by_rows else extents[::-1]
    return _compressed(operator, (*args, [*batch, *matrix, *values.shape[begin + 2 * has_blocks:]]), kwargs)


def _empty(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor without elements, as `torch.zeros` and `torch.empty` of sparse layouts do."""
    given = {name: item for name, item in kwargs.items() if name in ("dtype", "layout")}
    # Not `torch.empty`, which leaves the pointers of a compressed tensor uninitialized.
    return uploaded(torch.zeros(args[0], **given), kwargs.get("device"))


def _empty_of_dimensions(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazySparse:
    given = {**kwargs, "device": torch.device("cpu"), "layout": torch.sparse_coo, "pin_memory": None}
    return uploaded(operator(*args, **given), kwargs.get("device"))


def _new(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sparse, size = args
    options = {"dtype": kwargs.get("dtype") or sparse.dtype, "layout": kwargs.get("layout") or sparse.layout,
               "device": kwargs.get("device") or sparse.device}
    return torch.zeros(size, **options)


def _emptied(sparse: torch.Tensor, kwargs: dict[str, Any]) -> LazySparse:
    """Make a tensor without elements like a compressed one: blocks and dense dimensions are as there.

    Raises:
        RuntimeError: Eager makes none of this layout.
    """
    compressed, plain, values = sparse._parts if isinstance(sparse, LazySparse) else components_of(sparse)
    batch = plain.shape[:-1]
    made = torch.sparse_compressed_tensor(
        torch.zeros(compressed.shape, dtype=compressed.dtype), torch.zeros((*batch, 0), dtype=plain.dtype),
        torch.zeros((*batch, 0, *values.shape[plain.dim():]), dtype=kwargs.get("dtype") or sparse.dtype),
        size=sparse.shape, layout=sparse.layout)
    layout = kwargs.get("layout") or sparse.layout
    return uploaded(made if layout is sparse.layout else torch.zeros_like(made, layout=layout), kwargs.get("device"))


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor like a sparse one; one that is compressed has as many elements, at the same places."""
    sparse = args[0]
    layout = kwargs.get("layout") or sparse.layout
    if layout is torch.strided:
        rest = {name: item for name, item in kwargs.items() if name in ("dtype", "memory_format")}
        dense = torch.empty(sparse.shape, dtype=sparse.dtype, device=kwargs.get("device") or sparse.device)
        return operator(dense, *args[1:], **rest)
    if kwargs.get("memory_format") is not None:
        raise RuntimeError("memory format option is only supported by strided tensors")
    if operator is aten.zeros_like.default and sparse.layout is not torch.sparse_coo:
        return _emptied(sparse, kwargs)
    if operator in (aten.empty_like.default, aten.zeros_like.default) and layout is sparse.layout is torch.sparse_coo:
        return _empty_of_dimensions(
            aten._sparse_coo_tensor_with_dims.default, (sparse.sparse_dim(), sparse.dense_dim(), sparse.shape),
            {"dtype": kwargs.get("dtype") or sparse.dtype, "device": kwargs.get("device") or sparse.device})
    is_empty = layout is torch.sparse_coo or operator is aten.zeros_like.default
    if layout is not sparse.layout or is_empty or not isinstance(sparse, LazySparse):
        if operator not in (aten.empty_like.default, aten.zeros_like.default):
            refuse(operator.name())
        return _empty(operator, (sparse.shape,), {"dtype": sparse.dtype, "device": sparse.device, **{
            name: item for name, item in kwargs.items() if item is not None}, "layout": layout})
    *indices, values = sparse._parts
    rest = {name: item for name, item in kwargs.items() if name in ("dtype", "device")}
    return made_of(layout, [*(aten.clone.default(part) for part in indices), operator(values, *args[1:], **rest)],
                   sparse.shape)


def _validate(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check indices on the client, where an error is raised at once; a program asks for this to find a mistake."""
    local = iter(devices.current_session().materialize([item for item in args if isinstance(item, torch.Tensor)]))
    return operator(*(next(local) if isinstance(item, torch.Tensor) else item for item in args), **kwargs)


MAKERS = (aten._sparse_coo_tensor_with_dims_and_tensors.default,
          aten.sparse_compressed_tensor.comp_plain_value_size, aten.sparse_compressed_tensor.comp_plain_value,
          aten._sparse_coo_tensor_with_dims.default, aten._validate_compressed_sparse_indices.default)
"""Operators of `HANDLERS` that are called with dense tensors, or none."""
HANDLERS: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _coo,
    aten._sparse_coo_tensor_with_dims.default: _empty_of_dimensions,
    aten.sparse_compressed_tensor.comp_plain_value_size: _compressed,
    aten.sparse_compressed_tensor.comp_plain_value: _compressed_unsized,
    aten._validate_compressed_sparse_indices.default: _validate,
    **dict.fromkeys((aten.empty.memory_format, aten.zeros.default), _empty),
    **dict.fromkeys((aten.new_zeros.default, aten.new_empty.default), _new),
    **dict.fromkeys((aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
                     aten.randn_like.default), _like),
}
