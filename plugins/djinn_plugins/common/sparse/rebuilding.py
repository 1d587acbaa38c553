"""On the executor: makes sparse tensors of components, after checking them, and takes results apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from djinn.errors import ProtocolError, UnknownOperatorError
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.common.sparse.forms import (
    COMPONENTS,
    LAYOUTS,
    ConstantForm,
    DenseForm,
    ItemsForm,
    SparseCall,
    SparseForm,
    TorchForm,
    decoded,
)
from djinn_plugins.common.sparse.table import RUNS, written_by

__all__ = ("called", "needed_bytes", "taken_apart")

_LIMIT = 2**62
_ITEM_BYTES = 16
_WORK = 16
"""Kernels copy, sort and number their operands' elements; no more often than that."""
_PRODUCTS = frozenset("mm addmm addmm_ _sparse_addmm bmm _sparse_sparse_matmul sparse_sampled_addmm "
                      "_sparse_mm_reduce_impl".split())
_OF_ELEMENTS = frozenset("_coalesce t transpose neg clone mul div sparse_mask zeros_like cat unsqueeze _to_copy abs "
                         "sqrt pow sum _sparse_sum mv".split())
"""Operators that take memory for the elements of their operands only."""


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)


def rebuilt(form: SparseForm, components: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a sparse tensor of components that a client names.

    Raises:
        RuntimeError: They are no sparse tensor of this form.
    """
    _expect(all(part.layout is torch.strided for part in components),
            "a component is not dense")
    *indices, values = components
    _expect(all(part.dtype in (torch.int64, torch.int32) for part in indices), "indices are no integers")
    _expect(min(form.size, default=0) >= 0 and prod(max(extent, 1) for extent in form.size) * _ITEM_BYTES < _LIMIT,
            f"the size {list(form.size)} overflows")
    return _coo(form, indices[0], values) if form.layout == "coo" else _compressed(form, indices, values)


def _coo(form: SparseForm, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    _expect(indices.dim() == 2 and values.dim() > 0 and indices.dtype is torch.int64, "indices have no 2 dimensions")
    sparse_dim = indices.shape[0]
    _expect(sparse_dim <= len(form.size) and values.dim() - 1 == len(form.size) - sparse_dim
            and values.shape[0] == indices.shape[1] and tuple(values.shape[1:]) == form.size[sparse_dim:],
            f"indices {list(indices.shape)} and values {list(values.shape)} do not fit the size {list(form.size)}")
    if indices.numel():
        limits = torch.tensor(form.size[:sparse_dim], device=indices.device).unsqueeze(1)
        _expect(bool(((indices >= 0) & (indices < limits)).all()), f"an index is outside the size {list(form.size)}")
    if form.is_coalesced and indices.shape[1] > 1:
        _expect(_rises(indices, form.size[:sparse_dim]), "the indices are not coalesced")
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        sparse_dim, len(form.size) - sparse_dim, form.size, indices, values, dtype=values.dtype,
        layout=torch.sparse_coo, device=values.device, is_coalesced=form.is_coalesced)
    return made


def _rises(indices: torch.Tensor, size: Sequence[int]) -> bool:
    """Whether the indices are in order, each once."""
    place = torch.zeros_like(indices[0]) if len(size) else torch.zeros(indices.shape[1], dtype=torch.int64)
    for row, extent in zip(indices, size, strict=True):
        place = place * extent + row
    return bool((place[1:] > place[:-1]).all())


def _compressed(form: SparseForm, indices: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    layout = LAYOUTS[form.layout]
    _expect(indices[0].dtype is indices[1].dtype, "indices of two dtypes")
    # On a CPU: a CUDA kernel that finds an index that is none takes its process with it.
    torch._validate_sparse_compressed_tensor_args(
        indices[0].cpu().contiguous(), indices[1].cpu().contiguous(),
        torch.zeros((), dtype=values.dtype).expand(values.shape), form.size, layout)
    return torch.sparse_compressed_tensor(
        indices[0], indices[1], values, form.size, layout=layout, check_invariants=False)


def called(text: str, tensors: Sequence[torch.Tensor], numbers: Sequence[Any], *first: torch.Tensor) -> Any:
    """Make the call that a client describes.

    Args:
        text: See `djinn_plugins.common.sparse.forms.SparseCall`.
        tensors: The components of sparse tensors, and the dense tensors, in order.
        numbers: The numbers, in order.
        first: What the call writes; its first argument.

    Raises:
        UnknownOperatorError: The operator is not among those that are run on sparse tensors.
        ProtocolError: The text does not fit the rest.
    """
    call = decoded(text)
    namespace, _, name = call.operator.partition("::")
    if namespace != "aten" or name not in RUNS:
        raise UnknownOperatorError(f"{call.operator[:100]} is not run on sparse tensors.")
    operator = operator_named(call.operator)
    _check_constants(call, operator)
    rest = iter((*first, *map(_padded, tensors)))
    made: dict[Any, torch.Tensor] = {}

    def sparse(form: SparseForm, components: Sequence[torch.Tensor]) -> torch.Tensor:
        # Some kernels do something else if they are given one tensor twice.
        key = (form, *map(id, components))
        if key not in made:
            made[key] = rebuilt(form, components)
        return made[key]

    args, kwargs = call.filled(rest, iter(numbers), sparse, tensors[0].device)
    if next(rest, None) is not None:
        raise ProtocolError(f"{call.operator} is given too many tensors.")
    target = written_by(name, args, kwargs)
    if target is not None:
        # The client takes the written components for new ones.
        own = target.clone()
        return operator(own, *args[1:], **kwargs) if "out" not in kwargs else operator(*args, **{**kwargs, "out": own})
    return operator(*args, **kwargs)


def _check_constants(call: SparseCall, operator: torch._ops.OpOverload) -> None:
    """Check that what stands for a dtype, a layout and the like is none of the numbers that PyTorch takes for them.

    Raises:
        ProtocolError: It is.
    """
    kinds = {argument.name: str(argument.real_type) for argument in operator._schema.arguments}
    for name, form in [*zip(kinds, call.arguments, strict=False), *call.keywords.items()]:
        kind = kinds.get(name, "")
        is_constant = any(word in kind for word in ("ScalarType", "Layout", "Device", "MemoryFormat"))
        if is_constant and not isinstance(form, TorchForm) and not (
            isinstance(form, ConstantForm) and form.value is None):
            raise ProtocolError(f"{call.operator} takes {kind} as {name}.")


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that is not dense, with its strides, so that its storage has room for as many dense elements.

    Some kernels take their operands for dense. Others choose their path by strides, so these have to stay.
    """
    if tensor.layout is not torch.strided or not tensor.numel() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    reach = 1 + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor.new_zeros(max(reach, tensor.numel()))
    whole[:reach] = tensor.as_strided((reach,), (1,), tensor.storage_offset())
    return whole.as_strided(tensor.shape, tensor.stride())


def taken_apart(made: Any, layout: str) -> tuple[torch.Tensor, ...]:
    """Return the components of a result, and an empty tensor whose size tells what they do not.

    Raises:
        ProtocolError: The result is of another layout.
    """
    found = next((name for name, known in LAYOUTS.items() if getattr(made, "layout", None) is known), "")
    if not found or (layout == "coo") != (found == "coo"):
        raise ProtocolError(f"A result of layout {getattr(made, 'layout', None)} where another was announced.")
    about = (0, list(LAYOUTS).index(found), int(found == "coo" and made.is_coalesced()), *made.shape)
    told = torch.empty_strided(about, (0,) * len(about), dtype=torch.uint8, device=made.device)
    return (*components_of(made), told)


def components_of(sparse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices and values of an ordinary sparse tensor."""
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


def needed_bytes(named: Mapping[str, Any]) -> int:
    """Estimate from sizes how much memory a call may take, generously."""
    call = decoded(named["call"])
    tensors = [*([named["self"]] if "self" in named else []), *named["tensors"]]
    operands = _operand_sizes(call, tensors)
    work: int = sum(tensor.numel() for tensor in tensors) * _ITEM_BYTES * _WORK
    work += sum(sum(size) for size in operands) * 8
    name = call.operator.partition("::")[2].partition(".")[0]
    if name in _OF_ELEMENTS or name.rstrip("_") in _OF_ELEMENTS:
        return work
    if name == "index_select":
        # Each index may choose each element.
        chosen: int = tensors[-1].numel()
        return work * (1 + chosen)
    matrices = [size for size in operands if len(size) >= 2][-2:]
    if name in _PRODUCTS and len(matrices) == 2:
        return work + prod(matrices[0][:-1]) * matrices[1][-1] * _ITEM_BYTES
    return work + max((prod(size) for size in operands), default=0) * _ITEM_BYTES


def _operand_sizes(call: SparseCall, tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the sizes of a call's operands, in order."""
    rest, sizes = iter(tensors), []
    for form in (*call.arguments, *call.keywords.values()):
        for item in form.items if isinstance(form, ItemsForm) else (form,):
            if isinstance(item, SparseForm):
                sizes.append(item.size)
                for _ in range(COMPONENTS[item.layout]):
                    next(rest, None)
            elif isinstance(item, DenseForm):
                given = next(rest, None)
                sizes.append(() if given is None else tuple(given.shape))
    return sizes
