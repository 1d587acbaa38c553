"""Which operators run on sparse tensors, and what they return.

A server runs no other. Each is here because its CPU kernel was read: with components that keep the invariants it stays
within its operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

__all__ = ("RUNS", "SparseOutcome", "outcome_of", "written_by")

_UNARY = ("abs asin asinh atan atanh ceil erf erfinv expm1 floor frac log1p neg relu round sgn sign sin sinh sqrt tan "
          "tanh trunc deg2rad rad2deg isnan isinf isposinf isneginf signbit positive _conj_physical").split()
_SCALED = "mul.Tensor mul.Scalar div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode floor_divide".split()
_DENSE_RESULT = ("mm addmm _sparse_addmm bmm mv dot _to_dense to_dense sum _sparse_sum norm.Scalar "
                 "norm.ScalarOpt_dtype norm.ScalarOpt_dim native_norm native_norm.ScalarOpt_dim_dtype any").split()
_SUMS = "add.Tensor sub.Tensor".split()
_CONVERSIONS = {"_to_sparse": "coo", "_to_sparse.sparse_dim": "coo", "_to_sparse_csr": "csr", "_to_sparse_csc": "csc",
                "_to_sparse_bsr": "bsr", "_to_sparse_bsc": "bsc"}
_PAIRS = ("_sparse_mm_reduce_impl",)
_WRITES = "add_.Tensor sub_.Tensor addmm_".split()
"""Operators that write a dense tensor."""
_IN_PLACE = {"zero_": "zeros_like", "conj_physical_": "_conj_physical", "floor_divide_.Tensor": "floor_divide", **{
    f"{base}_{dot}{overload}": f"{base}{dot}{overload}" for base, dot, overload in (
        name.partition(".") for name in (*_UNARY, *_SCALED, *_SUMS, "nan_to_num") if name != "floor_divide")}}
_OUT = {f"{name.partition('.')[0]}.out": name for name in (*_UNARY, "mul.Tensor", "div.Tensor", *_SUMS)} | {
    "conj_physical.out": "_conj_physical"}
"""Operators that write a sparse tensor, and the operators that return as much."""
RUNS = frozenset((
    *_UNARY, *_SCALED, *_DENSE_RESULT, *_SUMS, *_CONVERSIONS, *_PAIRS, *_WRITES, *_IN_PLACE, *_OUT, "_coalesce",
    "_sparse_sparse_matmul", "sparse_mask", "sparse_sampled_addmm", "_sparse_sum.dim", "_sparse_sum_backward",
    "pow.Tensor_Scalar", "t", "transpose.int", "zeros_like", "clone", "_sparse_softmax", "_sparse_log_softmax",
    "_to_copy", "_sparse_softmax_backward_data", "_sparse_log_softmax_backward_data", "_sparse_mask_projection",
    "unsqueeze", "threshold_backward", "cat", "index_select", "select.int", "narrow_copy", "permute", "nan_to_num"))
"""Overloads that a server runs on sparse tensors, without their namespace."""
_KEEP_COUNT = frozenset(("t", "transpose.int", "neg", "clone", "zeros_like", "sparse_mask", "sparse_sampled_addmm",
                         "_to_copy", "unsqueeze", "permute"))
"""Operators whose result has as many elements as metadata say, also if the operands are not coalesced."""


@attrs.frozen
class SparseOutcome:
    """What an operator returns.

    Attributes:
        kind: The operator of ``djinn_sparse`` that returns such results.
        is_dynamic: Whether the number of elements depends on the operands' elements.
    """

    kind: str
    is_dynamic: bool = False


def outcome_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], sparse: Sequence[Any]
) -> SparseOutcome | None:
    """Return what an operator returns for these arguments; ``None`` if it is not run.

    Args:
        name: The overload, without namespace.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        sparse: The sparse tensors among them, by layout's name and whether the indices are known to be unique.
    """
    if name not in RUNS:
        return None
    if name in _WRITES and not _is_sparse(args[0]):
        return SparseOutcome("write_")
    if written_by(name, args, kwargs) is not None:
        rest = {keyword: item for keyword, item in kwargs.items() if keyword != "out"}
        return outcome_of(_IN_PLACE.get(name) or _OUT[name], args, rest, sparse)
    if "out" in kwargs:
        return None
    if name in _PAIRS:
        return SparseOutcome("pair")
    if name in _CONVERSIONS:
        return _sparse_outcome(_target_of(name, args, kwargs), is_dynamic=True)
    if name in _SUMS and not all(map(_is_sparse, args[:2])):
        return SparseOutcome("dense")
    if name in _DENSE_RESULT and not (name in ("mm", "addmm") and all(map(_is_sparse, args[-2:]))):
        return SparseOutcome("dense")
    if name == "_sparse_sum.dim" and {*range(args[0].sparse_dim())} <= {dim % args[0].dim() for dim in args[1]}:
        return SparseOutcome("dense")
    if name == "select.int" and (args[0].sparse_dim() == 1 or sparse[0][0] != "coo"):
        return SparseOutcome("dense") if sparse[0][0] == "coo" and args[1] in (0, -args[0].dim()) else None
    layout = sparse[0][0] if sparse else "coo"
    if name in ("t", "transpose.int"):
        layout = {"csr": "csc", "csc": "csr", "bsr": "bsc", "bsc": "bsr"}.get(layout, layout)
    keeps = name in _KEEP_COUNT or name in _UNARY or name in ("pow.Tensor_Scalar", "nan_to_num") or (
        name in _SCALED and not any(_has_dimensions(item) for item in args[1:2]))
    are_unique = name in _KEEP_COUNT or all(is_unique for _, is_unique in sparse)
    return _sparse_outcome(layout, is_dynamic=not (keeps and are_unique))


def written_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the sparse tensor that a call writes, or ``None``."""
    target = args[0] if name in _IN_PLACE else kwargs.get("out") if name in _OUT else None
    return target if _is_sparse(target) else None


def _sparse_outcome(layout: str, *, is_dynamic: bool) -> SparseOutcome:
    return SparseOutcome("coo" if layout == "coo" else "compressed", is_dynamic)


def _target_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    asked = kwargs.get("layout")
    return _CONVERSIONS[name] if asked is None else str(asked).removeprefix("torch.sparse_")


def _is_sparse(item: Any) -> bool:
    layout = getattr(item, "layout", None)
    return layout is not None and str(layout).startswith("torch.sparse")


def _has_dimensions(item: Any) -> bool:
    return hasattr(item, "dim") and item.dim() > 0
