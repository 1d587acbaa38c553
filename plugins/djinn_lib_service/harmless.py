"""Operations that may run before they are requested: they raise for no data, and repeat exactly."""

from __future__ import annotations

from functools import cache

from djinn.ir.schema import facts_of
from djinn.ir.tape import Signature
from djinn_lib_service.operators import operator_named

__all__ = ("is_harmless", "is_repeatable", "moved_bytes")

_VIEWS = frozenset("""
    alias detach expand expand_as permute select slice split split_with_sizes squeeze t transpose unbind unsqueeze view
    _unsafe_view _reshape_alias unfold diagonal narrow
""".split())
"""Their in-place forms change metadata, and are not harmless."""
_VALUES = frozenset("""
    abs add addcdiv addcmul all amax amin any argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor cat
    ceil clamp clamp_max clamp_min clone copy count_nonzero div eq equal exp fill flip floor full full_like ge
    gt is_nonzero isfinite isin isinf isnan isneginf isposinf le lerp linalg_vector_norm log log1p log2
    logical_and logical_not logical_or logical_xor lt masked_fill max maximum mean min minimum mul ne neg
    new_full new_ones new_zeros norm ones ones_like pow reciprocal round rsqrt rsub sigmoid sign sort sqrt
    stack sub sum tanh tril triu where zero zeros zeros_like _local_scalar_dense _log_softmax _softmax
    _to_copy
""".split())
"""Operators, without overloads and the mark of in-place forms. None looks anything up, divides integers, factorizes, or
adds in an order that may change from run to run."""
_OPTIMIZERS = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
_REFUSED = frozenset({"aten::div.Tensor_mode", "aten::div.Scalar_mode", "aten::pow.Tensor_Tensor", "aten::pow.Scalar",
                      "aten::_foreach_pow.List", "aten::_foreach_pow.ScalarAndTensor"})


def is_harmless(signature: Signature) -> bool:
    """Whether an operation cannot fail on operands with this metadata, and draws no random numbers."""
    return not signature.is_random and _never_fails(signature.template.operator)


def is_repeatable(signature: Signature) -> bool:
    """Whether, in addition, it repeats exactly, and has an effect only on what it writes."""
    return is_harmless(signature) and (bool(signature.writes) or bool(signature.results))


def moved_bytes(signature: Signature) -> int:
    """Return how many bytes an operation reads and writes; none for views."""
    if signature.aliases and min(signature.aliases) >= 0:
        return 0
    return sum(spec.size_bytes for spec in (*signature.operands, *signature.results) if spec is not None)


@cache
def _never_fails(name: str) -> bool:
    if not name.startswith("aten::") or name in _REFUSED:
        return False
    base = name.removeprefix("aten::").removeprefix("_foreach_").partition(".")[0]
    if base not in _VIEWS and base not in _OPTIMIZERS and base.rstrip("_") not in _VALUES:
        return False
    return not facts_of(operator_named(name)).changes_metadata
