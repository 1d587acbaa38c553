"""Operations that may run before they are requested: they raise for no data, and repeat exactly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from djinn.ir.schema import facts_of
from djinn.ir.tape import Node, Signature
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("are_harmless", "is_harmless", "moved_bytes")

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
    new_full new_ones new_zeros norm ones ones_like pow reciprocal round rsqrt rsub scalar_tensor sigmoid sign sort
    sqrt stack sub sum tanh tril triu where zero zeros zeros_like _local_scalar_dense _log_softmax _softmax
    _to_copy
""".split())
"""Operators, without overloads and the mark of in-place forms. None looks anything up, divides integers, factorizes, or
adds in an order that may change from run to run."""
_LOOKUPS = frozenset({"aten::index.Tensor", "aten::index_put_"})
_OPTIMIZERS = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
_REFUSED = frozenset({"aten::div.Tensor_mode", "aten::div.Scalar_mode", "aten::pow.Tensor_Tensor", "aten::pow.Scalar",
                      "aten::_foreach_pow.List", "aten::_foreach_pow.ScalarAndTensor"})


def is_harmless(signature: Signature) -> bool:
    """Whether an operation cannot fail on operands with this metadata, and draws no random numbers."""
    return not signature.is_random and _never_fails(signature.template.operator)


def are_harmless(nodes: Sequence[Node]) -> bool:
    """Whether none of these operations can fail. Indices of no element, and zeros that they make, fit each dimension.

    PyTorch indexes a tensor without dimensions by such indices, once it has asked for the truth value of the mask.
    """
    zeros: set[int] = set()
    for node in nodes:
        signature = node.signature
        if not is_harmless(signature) and not _is_empty(signature) and not _looks_up_at(zeros, node):
            return False
        zeros.difference_update(node.inputs[index].storage for index in signature.writes)
        if signature.template.operator == "aten::zeros":
            zeros.add(node.outputs[0].number)
    return True


def _is_empty(signature: Signature) -> bool:
    made = signature.results
    return signature.template.operator == "aten::empty.memory_format" and made[0] is not None and not made[0].numel


def _looks_up_at(zeros: set[int], node: Node) -> bool:
    """Whether a node reads or writes elements at positions that are known to be there."""
    operator, operands = node.signature.template.operator, node.signature.operands
    if operator not in _LOOKUPS or not min(operands[0].size, default=0):
        return False
    indices = range(1, len(operands) - (operator == "aten::index_put_"))
    return all(operands[index].dtype is torch.int64 and (
        not operands[index].numel or (operands[index].numel == 1 and node.inputs[index].number in zeros))
        for index in indices)


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
