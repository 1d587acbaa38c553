"""Operations on lazy sparse tensors: what metadata answers, what components answer, and what the executor runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from djinn.ir.schema import facts_of
from djinn.record import devices
from djinn.record.tensor import LazyTensor
from djinn_plugins.common.sparse.forms import (
    LAYOUTS,
    ConstantForm,
    DenseForm,
    Form,
    ItemsForm,
    NumberForm,
    SparseCall,
    SparseForm,
    constant_form,
    layout_name,
    sequence_form,
)
from djinn_plugins.common.sparse.operators import NAMESPACE, define
from djinn_plugins.common.sparse.table import SparseOutcome, outcome_of, written_by
from djinn_plugins.device.sparse import making
from djinn_plugins.device.sparse.bags import bag_gradient
from djinn_plugins.device.sparse.making import refuse, uploaded
from djinn_plugins.device.sparse.tensor import LazySparse, at_home, made_of, same_parts

__all__ = ("run", "uploaded")

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an operator with a sparse tensor on the device among its arguments, or among its results.

    Raises:
        UnsupportedTensorError: The operator has no remote form for sparse tensors.
    """
    return _HANDLERS.get(operator, _carried_out)(operator, args, kwargs)


def _carried_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    facts = facts_of(operator)
    name = facts.name.partition("::")[2]
    described = _Described()
    call = described.call(operator, args, kwargs)
    outcome = outcome_of(name, args, kwargs, described.sparse) if facts.name.startswith("aten::") else None
    if outcome is None:
        return operator.decompose(*args, **kwargs) if facts.is_composite else refuse(facts.name)
    made = _recorded(outcome, call, described)
    target = written_by(name, args, kwargs)
    return made if target is None else _replaced(target, made)


class _Described:
    """The tensors and numbers of a call, in the order of its description."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.numbers: list[Any] = []
        self.sparse: list[tuple[str, bool]] = []

    def call(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SparseCall:
        """Describe a call."""
        return SparseCall(operator.name(), tuple(map(self._form, args)),
                    {name: self._form(item) for name, item in kwargs.items() if item is not None})

    def _form(self, item: Any) -> Form:
        if isinstance(item, torch.Tensor) and item.layout is not torch.strided:
            sparse = item if isinstance(item, LazySparse) else devices.current_session().mixer.upload(item)
            self.tensors += sparse._parts
            name = layout_name(sparse.layout)
            self.sparse.append((name, sparse._is_unique))
            return SparseForm(name, tuple(sparse.shape), name == "coo" and sparse._is_unique)
        if isinstance(item, torch.Tensor):
            session = devices.current_session()
            self.tensors.append(item if isinstance(item, LazyTensor) else session.mixer.upload(item))
            return DenseForm()
        if isinstance(item, (list, tuple)):
            items: Any = tuple(map(ConstantForm, item)) if sequence_form(item) else tuple(map(self._form, item))
            return ItemsForm(items)
        if isinstance(item, (int, float, complex)) and not isinstance(item, bool):
            if type(item) is int:
                return ConstantForm(item)
            self.numbers.append(item)
            return NumberForm()
        return constant_form(item)


def _recorded(outcome: SparseOutcome, call: SparseCall, described: _Described) -> Any:
    define()
    name = f"dynamic_{outcome.kind}" if outcome.is_dynamic else outcome.kind
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    dispatch = devices.current_session().dispatch
    tensors, numbers = described.tensors, described.numbers
    if outcome.kind == "write_":
        return dispatch(operator, (call.encoded(), tensors[0], tensors[1:], numbers), {})
    made = dispatch(operator, (call.encoded(), tensors, numbers), {})
    if outcome.kind in ("dense", "pair"):
        return made
    *parts, told = made
    _, layout, is_unique, *size = told.shape
    return made_of(list(LAYOUTS.values())[layout], parts, size, is_unique=bool(is_unique))


def _replaced(target: LazySparse, made: LazySparse) -> LazySparse:
    """Give a tensor the components of another one, as a write in place does."""
    if target.shape != made.shape:
        refuse("An output of another size")
    target._parts, target._is_unique = made._parts, made._is_unique
    return target


def _part(index: int, layouts: tuple[torch.layout, ...], kind: str) -> Handler:
    def handler(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sparse = args[0]
        _check_layout(operator, sparse, layouts, kind)
        name = operator.name().rpartition("::")[2]
        if not (sparse._is_unique or name.startswith("_")):
            raise RuntimeError(f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first")
        return aten.detach.default(sparse._parts[index])

    return handler


def _check_layout(operator: Any, sparse: torch.Tensor, layouts: tuple[torch.layout, ...], kind: str) -> None:
    """Raise what eager raises for a component that a layout does not have.

    Raises:
        NotImplementedError: It has none, and eager no kernel.
        RuntimeError: It has none.
    """
    if sparse.layout in layouts:
        return
    name = operator.name().rpartition("::")[2]
    if name.startswith("_"):
        raise NotImplementedError(f"Could not run '{operator.name()}' with arguments from the 'SparseCsrCPU' backend.")
    got = "Sparse" + layout_name(sparse.layout).capitalize().replace("Coo", "")
    raise RuntimeError(f"{name} expected sparse {kind} tensor layout but got {got}")


def _is_coalesced(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    _check_layout(operator, args[0], *_COORDINATES)
    return bool(args[0]._is_unique)


def _to_copy(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sparse, device = args[0], kwargs.get("device")
    rest = {name: item for name, item in kwargs.items() if name not in ("device", "layout", "pin_memory")}
    if kwargs.get("layout") not in (None, sparse.layout):
        refuse(f"Copying to the layout {kwargs['layout']}")
    if not isinstance(sparse, LazySparse):
        return uploaded(operator(sparse, **rest) if rest.get("dtype") not in (None, sparse.dtype) else sparse, device)
    if device is not None and device.type != sparse.device.type:
        return operator(at_home(sparse), **kwargs)
    moved = {} if device is None else {"device": device}
    *indices, values = sparse._parts
    return made_of(sparse.layout, [*(aten._to_copy.default(part, **moved) for part in indices),
                                   aten._to_copy.default(values, **moved, **rest)], sparse.shape,
                   is_unique=sparse._is_unique)


def _copy_(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    if not isinstance(target, LazySparse):
        if isinstance(source, LazySparse) and target.device.type == "cpu":
            return operator(target, at_home(source), *args[2:])
        refuse("copy_ of a sparse tensor into a dense one")
    if target.layout is not source.layout:
        refuse(f"copy_ between {source.layout} and {target.layout}")
    own = run(aten.clone.default, (source,), {}) if isinstance(source, LazySparse) else uploaded(source, target.device)
    if own.dtype is not target.dtype:
        own = _to_copy(aten._to_copy.default, (own,), {"dtype": target.dtype})
    return _replaced(target, own)


def _clone(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazySparse:
    sparse = args[0]
    return made_of(sparse.layout, [aten.clone.default(part) for part in sparse._parts], sparse.shape,
                   is_unique=sparse._is_unique)


def _count(sparse: LazySparse) -> int:
    return int(sparse._parts[-1].shape[0] if len(sparse._parts) == 2 else sparse._parts[1].shape[-1])


def _sparse_dim(sparse: LazySparse) -> int:
    return int(sparse._parts[0].shape[0]) if len(sparse._parts) == 2 else 2


def _dense_dim(sparse: LazySparse) -> int:
    first, *_, values = sparse._parts
    blocks = 2 if sparse.layout in (torch.sparse_bsr, torch.sparse_bsc) else 0
    return int(values.dim()) - 1 if len(sparse._parts) == 2 else int(values.dim() - first.dim()) - blocks


def _mark(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazySparse:
    args[0]._is_unique = bool(args[1])
    return args[0]  # type: ignore[no-any-return]  # a LazySparse


def _mul_(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply a dense tensor in place, as eager does it; a sparse one is not written here.

    Source:
        ``mul_sparse_`` in aten/src/ATen/native/sparse/SparseTensorMath.cpp.
    """
    target, other = args
    if isinstance(target, LazySparse):
        return _carried_out(operator, args, kwargs)
    product = run(aten.mul.Tensor, (target, other), {})
    return run(aten.add_.Tensor, (target.zero_(), product), {})


def _sum(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add up some dimensions, as eager does it.

    Source:
        ``sum_sparse_coo`` in aten/src/ATen/native/ReduceOps.cpp.
    """
    sparse, dims, keeps = args[0], args[1] if len(args) > 1 else None, len(args) > 2 and args[2]
    if sparse.layout is not torch.sparse_coo or dims is None:
        return _carried_out(operator, args, kwargs)
    is_real = sparse.dtype.is_floating_point or sparse.dtype.is_complex
    dtype = kwargs.get("dtype") or (None if is_real else torch.int64)
    converted = sparse if dtype in (None, sparse.dtype) else run(aten._to_copy.default, (sparse,), {"dtype": dtype})
    made = run(aten._sparse_sum.dim, (converted, dims), {})
    for dim in sorted({dim % sparse.dim() for dim in dims}) if keeps else ():
        made = aten.unsqueeze.default(made, dim)
    return made


def _stack(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    return run(aten.cat.default, ([aten.unsqueeze.default(tensor, dim) for tensor in tensors],
                                  dim + tensors[0].dim() + 1 if dim < 0 else dim), {})


def _select(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Select a row or column; eager gives that of a compressed matrix as one in coordinates."""
    sparse, *place = args
    is_compressed = sparse.layout in (torch.sparse_csr, torch.sparse_csc) and sparse.dim() == 2
    return _carried_out(operator, (sparse.to_sparse() if is_compressed else sparse, *place), kwargs)


def _angle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sparse = args[0]
    if sparse.layout is torch.sparse_coo:
        return _carried_out(operator, args, kwargs)
    *indices, values = sparse._parts
    return made_of(sparse.layout, [*indices, aten.angle.default(values)], sparse.shape, is_unique=sparse._is_unique)


def _alias(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazySparse:
    return same_parts(args[0])


_ROWS = (torch.sparse_csr, torch.sparse_bsr), "row compressed"
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc), "column compressed"
_COORDINATES = (torch.sparse_coo,), "coordinate"
_HANDLERS: Mapping[Any, Handler] = {
    aten._indices.default: _part(0, *_COORDINATES),
    aten._values.default: _part(-1, *_COORDINATES),
    aten.indices.default: _part(0, *_COORDINATES),
    aten.values.default: _part(-1, (*_COORDINATES[0], *_ROWS[0], *_COLUMNS[0]), ""),
    aten.crow_indices.default: _part(0, *_ROWS),
    aten.col_indices.default: _part(1, *_ROWS),
    aten.ccol_indices.default: _part(0, *_COLUMNS),
    aten.row_indices.default: _part(1, *_COLUMNS),
    aten._nnz.default: lambda operator, args, kwargs: _count(args[0]),
    **dict.fromkeys((aten.sparse_dim.default, aten._dimI.default),
                    lambda operator, args, kwargs: _sparse_dim(args[0])),
    **dict.fromkeys((aten.dense_dim.default, aten._dimV.default),
                    lambda operator, args, kwargs: _dense_dim(args[0])),
    aten.is_coalesced.default: _is_coalesced,
    aten._coalesced_.default: _mark,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.clone.default: _clone,
    aten.mul_.Tensor: _mul_,
    aten.stack.default: _stack,
    aten.select.int: _select,
    aten.angle.default: _angle,
    **making.HANDLERS,
    aten.sum.dim_IntList: _sum,
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.lift_fresh.default), _alias),
}


def handlers() -> dict[Any, Callable[..., Any]]:
    """Return handlers of operators that make sparse tensors of lazy ones, for the interceptor."""
    makers = (*making.MAKERS, aten._to_sparse.default, aten._to_sparse.sparse_dim, aten._to_sparse_csr.default,
              aten._to_sparse_csc.default, aten._to_sparse_bsr.default, aten._to_sparse_bsc.default)
    made: dict[Any, Callable[..., Any]] = dict.fromkeys(
        makers, lambda session, operator, args, kwargs: run(operator, args, kwargs))
    return {**made, aten._embedding_bag_backward.default: bag_gradient,
            # Those of a dense tensor.
            aten.sparse_dim.default: lambda session, operator, args, kwargs: 0,
            aten.dense_dim.default: lambda session, operator, args, kwargs: args[0].dim()}
