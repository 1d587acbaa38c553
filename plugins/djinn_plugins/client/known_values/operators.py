"""Which operations the client may compute itself: those whose integer results are the same bits on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from djinn.ir.program import ConstantArgument
from djinn.ir.schema import facts_of
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node, Signature
from djinn_plugins.client.known_values.arithmetic import ARITHMETIC, REALS, depends_on_threads
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("ABSORBING", "Rule", "absorbed", "gives_new_shapes", "has_exact_numbers", "is_followed_upload",
           "is_integer_spec", "is_real_number", "overwrites", "rounds", "rule_of")

_EXACT = frozenset("""
    arange full zeros ones scalar_tensor full_like zeros_like ones_like new_full new_zeros new_ones
    lift_fresh lift_fresh_copy _to_copy clone detach alias as_strided
    view _unsafe_view reshape unsqueeze squeeze expand slice select transpose permute t unbind split flip repeat
    cat stack index_select gather
    eq ne lt le gt ge isin logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    add sub rsub mul neg minimum maximum clamp where masked_fill tril triu
    any all sum prod amax amin cumsum count_nonzero
    _local_scalar_dense is_nonzero equal
""".split())
"""Operators, without their overloads. No division and no shift: devices differ in what they do at the edges. No
position of an extreme: devices differ in which of several they find."""
_COMPARED = frozenset("eq ne lt le gt ge logical_and logical_or logical_xor logical_not any all isnan".split())
"""Operators of real numbers whose results are truth values."""
ROUNDED = frozenset("add sub rsub mul neg abs".split())
"""Operators of real numbers that the standard of floating-point numbers determines, but for the bits of NaN."""
_EXACT_REALS = ROUNDED | _COMPARED | frozenset("""
    arange full zeros ones scalar_tensor full_like zeros_like ones_like new_full new_zeros new_ones
    lift_fresh lift_fresh_copy _to_copy clone detach alias as_strided
    view _unsafe_view reshape unsqueeze squeeze expand slice select transpose permute t unbind split flip
    stack where masked_fill
""".split())
"""Operators of single real numbers that give the same bits on every device: those that move them, compare them, and
round once.
"""
_UPDATES = frozenset("""
    add sub mul neg fill zero copy masked_fill index_fill
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
""".split())
"""Operators, without the marks of in-place forms and of lists, whose written operands are as exact as results."""
_OVERWRITES = frozenset({"fill", "zero", "copy"})
"""Of these, the ones that do not read the values that they overwrite."""
_MOST_EXACT = 2**24
"""Integers below it are exact in each type of real numbers that is followed, in any order of additions."""
_EXACT_OVERLOADS = frozenset({"aten::max", "aten::min"})
"""Extremes without their positions."""
_PLAIN = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})
"""Operators whose result is not a tensor."""
_SHAPES = frozenset("nonzero _unique2 unique_consecutive unique_dim bincount repeat_interleave".split())
"""Operators whose results are integers, but have sizes that depend on data; their layouts depend on the device."""
_MOVE = "aten::set_.source_Tensor_storage_offset"
"""``torch.load`` gives each tensor its place in a storage."""
_ZERO_ABSORBS = frozenset({"aten::bitwise_and.Tensor", "aten::logical_and", "aten::mul.Tensor"})
_TRUE_ABSORBS = frozenset({"aten::bitwise_or.Tensor", "aten::logical_or"})
ABSORBING = _ZERO_ABSORBS | _TRUE_ABSORBS
"""Operators of two tensors whose result one of them may decide."""
_FOLLOWED_REALS = frozenset({torch.float32, torch.float64})
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
    UPDATES = 4
    """Its written values are known if its operands are."""
    MOVES = 5
    """It gives a tensor a place in the storage of another one."""

    @property
    def hides(self) -> bool:
        """Whether the operands that it writes do not tell all that it changes."""
        return self in (Rule.HIDES, Rule.MOVES)


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
    if template.operator == _MOVE:
        return Rule.MOVES
    if not template.operator.startswith("aten::") or facts_of(operator).changes_metadata or hides(operator):
        return Rule.HIDES
    name = _name_of(signature)
    specs = (*signature.operands, *filter(None, signature.results))
    has_reals = any(spec.dtype not in _INTEGERS for spec in specs)
    if signature.writes:
        written = [signature.operands[place] for place in signature.writes if place < len(signature.operands)]
        is_exact = (name.endswith("_") and base_of(name) in _UPDATES and not signature.results
                    and len(written) == len(signature.writes)
                    and not (signature.is_random or template.switches)
                    and all(spec.size_bytes <= limit_bytes and not _overlaps(spec) for spec in written)
                    and (not has_reals or _is_exact_update(signature, written)))
        return Rule.UPDATES if is_exact else Rule.WRITES
    if name in _SHAPES:
        # The order of values that are not sorted depends on the device, and so does that of sums.
        is_sorted = name != "_unique2" or ConstantArgument(value=False) not in template.arguments[1:2]
        is_exact = is_sorted and not template.switches and not (has_reals and name == "bincount")
        return Rule.COMPUTES if is_exact else Rule.NOTHING
    is_exact = name in _EXACT or template.operator in _EXACT_OVERLOADS or (takes_reals and name in ARITHMETIC) or (
        has_reals and name in _EXACT_REALS)
    if not is_exact or signature.is_random or template.switches or depends_on_threads(name, signature):
        return Rule.NOTHING
    if has_reals and not takes_reals and not _is_exact_real(name, signature):
        return Rule.NOTHING
    if template.operator in _PLAIN:
        return Rule.COMPUTES
    dtypes = _INTEGERS | REALS
    for spec in signature.results:
        if spec is None or spec.dtype not in dtypes or spec.size_bytes > limit_bytes:
            return Rule.NOTHING
    return Rule.COMPUTES if signature.results else Rule.NOTHING


def _is_exact_real(name: str, signature: Signature) -> bool:
    """Whether an operation on single real numbers gives the same bits on every device."""
    results = [spec for spec in signature.results if spec is not None]
    if all(map(is_integer_spec, results)):
        # To make an integer of a real number is undefined beyond its range.
        return not results or name in _COMPARED
    return name in _EXACT_REALS and not _is_scaled(signature) and all(
        spec.dtype in _INTEGERS or spec.dtype in _FOLLOWED_REALS for spec in signature.operands) and all(
        is_integer_spec(spec) or is_real_number(spec) for spec in results)


def _is_exact_update(signature: Signature, written: Sequence[TensorSpec]) -> bool:
    """The same for an operation that writes: only real numbers, each for itself."""
    return not _is_scaled(signature) and all(is_real_number(spec) for spec in written) and all(
        spec.dtype in _INTEGERS or spec.dtype in _FOLLOWED_REALS for spec in signature.operands)


def _is_scaled(signature: Signature) -> bool:
    """Whether a product is added, which some kernels round once, and others twice."""
    return any(name == "alpha" for name, _ in signature.template.keywords)


def _overlaps(spec: TensorSpec) -> bool:
    """Whether elements may share their place in memory."""
    reach = 0
    for step, extent in sorted(zip(spec.stride, spec.size, strict=True)):
        if extent > 1 and step <= reach:
            return True
        reach += (extent - 1) * step
    return False


def base_of(name: str) -> str:
    """Return what an operator that writes is called where it does not, and takes one tensor."""
    return name.removeprefix("_foreach_").rstrip("_")


def overwrites(signature: Signature) -> bool:
    """Whether an operation does not read the values that it overwrites."""
    return base_of(_name_of(signature)) in _OVERWRITES


def rounds(signature: Signature) -> bool:
    """Whether an operation computes real numbers."""
    return base_of(_name_of(signature)) in ROUNDED


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


def has_exact_numbers(node: Node) -> bool:
    """Whether devices round no number of a call differently: all are integers, or one operand or result is real."""
    if not node.numbers:
        return True
    signature = node.signature
    are_integers = all(map(_is_integer, node.numbers))
    if are_integers and not signature.template.operator.startswith("aten::arange"):
        return True
    has_reals = any(spec.dtype not in _INTEGERS for spec in (*signature.operands, *filter(None, signature.results)))
    if has_reals and _name_of(signature) == "arange":
        return are_integers and all(abs(number) < _MOST_EXACT for number in node.numbers)
    return has_reals or are_integers


def gives_new_shapes(signature: Signature) -> bool:
    """Whether the sizes of an operation's results depend on data."""
    return _name_of(signature) in _SHAPES


def is_integer_spec(spec: TensorSpec) -> bool:
    """Whether the elements of a value are integers or booleans."""
    return spec.dtype in _INTEGERS


def is_real_number(spec: TensorSpec) -> bool:
    """Whether a value is one real number, of a type that is followed."""
    return spec.dtype in _FOLLOWED_REALS and spec.numel == 1


def is_followed_upload(tensor: torch.Tensor, limit_bytes: int) -> bool:
    """Whether an uploaded or fetched tensor is followed: small integers, and single real numbers."""
    return tensor.nbytes <= limit_bytes and (
        tensor.dtype in _INTEGERS or (tensor.dtype in _FOLLOWED_REALS and tensor.numel() == 1))


def _is_integer(number: Any) -> bool:
    if isinstance(number, (list, tuple)):
        return all(map(_is_integer, number))
    return isinstance(number, int)


def _name_of(signature: Signature) -> str:
    return signature.template.operator.removeprefix("aten::").partition(".")[0]
