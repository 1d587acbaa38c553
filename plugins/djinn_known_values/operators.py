"""Which operations the client may compute itself: those whose integer results are the same bits on every device."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from djinn_lib_service.operators import operator_named

from djinn.ir.program import ConstantArgument
from djinn.ir.schema import facts_of
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node, Signature
from djinn.ir.value import Slot
from djinn_known_values.arithmetic import ARITHMETIC, REALS, depends_on_threads

__all__ = ("ABSORBING", "Rule", "absorbed", "gives_new_shapes", "is_integer_spec", "is_integer_tensor", "mask_of",
           "rule_of", "takes_only_integers")

_EXACT = frozenset("""
    arange full zeros ones scalar_tensor full_like zeros_like ones_like new_full new_zeros new_ones
    lift_fresh lift_fresh_copy _to_copy clone detach alias
    view _unsafe_view reshape unsqueeze squeeze expand slice select transpose permute t unbind split flip repeat
    cat stack index_select gather
    eq ne lt le gt ge isin logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    add sub rsub mul neg minimum maximum clamp where masked_fill tril triu
    any all sum prod amax amin cumsum count_nonzero
    _local_scalar_dense is_nonzero equal
""".split())
"""Operators, without their overloads. No division and no shift: devices differ in what they do at the edges. No
position of an extreme: devices differ in which of several they find."""
_EXACT_OVERLOADS = frozenset({"aten::max", "aten::min"})
"""Extremes without their positions."""
_PLAIN = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})
"""Operators whose result is not a tensor."""
_SHAPES = frozenset({"nonzero", "_unique2"})
"""Operators whose results are integers, but have sizes that depend on data; their layouts depend on the device."""
_MASKED = frozenset({"aten::index.Tensor", "aten::masked_select"})
"""Operators whose result has as many elements as a mask chooses."""
_ZERO_ABSORBS = frozenset({"aten::bitwise_and.Tensor", "aten::logical_and", "aten::mul.Tensor"})
_TRUE_ABSORBS = frozenset({"aten::bitwise_or.Tensor", "aten::logical_or"})
ABSORBING = _ZERO_ABSORBS | _TRUE_ABSORBS
"""Operators of two tensors whose result one of them may decide."""
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Rule(Enum):
    """What an operation means for the values that the client knows."""

    NOTHING = 0
    """Its results are not known, and it writes nothing."""
    WRITES = 1
    """It writes some of its operands."""
    HIDES = 2
    """It may write any of its operands, or let them share their storage."""
    COMPUTES = 3
    """Its results are known if its operands are."""


def rule_of(
    signature: Signature, limit_bytes: int, hides: Callable[[torch._ops.OpOverload], bool], *, takes_reals: bool = False
) -> Rule:
    """Return what the operations with a signature mean.

    Args:
        signature: The signature.
        limit_bytes: Size of the largest value that the client computes.
        hides: Says whether an operator may have effects that its schema does not declare.
        takes_reals: Whether the client computes real numbers as the executor does.
    """
    template = signature.template
    operator = operator_named(template.operator)
    if not template.operator.startswith("aten::") or facts_of(operator).changes_metadata or hides(operator):
        return Rule.HIDES
    if signature.writes:
        return Rule.WRITES
    name = _name_of(signature)
    if name in _SHAPES:
        # The order of values that are not sorted depends on the device.
        is_sorted = name != "_unique2" or ConstantArgument(value=False) not in template.arguments[1:2]
        return Rule.COMPUTES if is_sorted and not template.switches else Rule.NOTHING
    is_exact = name in _EXACT or template.operator in _EXACT_OVERLOADS or (takes_reals and name in ARITHMETIC)
    if not is_exact or signature.is_random or template.switches or depends_on_threads(name, signature):
        return Rule.NOTHING
    if template.operator in _PLAIN:
        return Rule.COMPUTES
    dtypes = _INTEGERS | REALS if takes_reals else _INTEGERS
    for spec in signature.results:
        if spec is None or spec.dtype not in dtypes or spec.size_bytes > limit_bytes:
            return Rule.NOTHING
    return Rule.COMPUTES if signature.results else Rule.NOTHING


def absorbed(operator: str, operand: torch.Tensor, result: TensorSpec) -> int | None:
    """Return what all elements of a result are, whatever the other operand is; ``None`` if that decides.

    Args:
        operator: The operator, of two tensors.
        operand: The one that is known; each element of the result is made of one of its elements.
        result: Metadata of the result.
    """
    if operator in _ZERO_ABSORBS:
        return None if operand.any() else 0
    if operator in _TRUE_ABSORBS and result.dtype is torch.bool:
        return 1 if operand.all() else None
    return None


def takes_only_integers(node: Node) -> bool:
    """Whether no number of a call is a real or complex one, which devices may round differently."""
    return all(map(_is_integer, node.numbers))


def gives_new_shapes(signature: Signature) -> bool:
    """Whether the sizes of an operation's results depend on data."""
    return _name_of(signature) in _SHAPES


def mask_of(node: Node) -> Slot | None:
    """Return the mask that alone decides how many elements an operation chooses, each of which it covers."""
    if node.signature.template.operator not in _MASKED or len(node.inputs) != 2:
        return None
    masked, mask = node.signature.operands
    return node.inputs[1] if mask.dtype is torch.bool and mask.size == masked.size else None


def is_integer_spec(spec: TensorSpec) -> bool:
    """Whether the elements of a value are integers or booleans."""
    return spec.dtype in _INTEGERS


def is_integer_tensor(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor are integers or booleans."""
    return tensor.dtype in _INTEGERS


def _is_integer(number: Any) -> bool:
    if isinstance(number, (list, tuple)):
        return all(map(_is_integer, number))
    return isinstance(number, int)


def _name_of(signature: Signature) -> str:
    return signature.template.operator.removeprefix("aten::").partition(".")[0]
