"""Elements that a program selects by the number that it has just waited for, as ``probabilities[token.item()]``.

The executor selects them by the value itself, before the number is known here: both come with one answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from djinn.ir.program import NumberArgument, Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node, Signature
from djinn.ir.value import Slot

__all__ = ("index_read_by", "is_selection", "selecting")

_TAKE_NUMBER, _REMAINDER_NUMBER = -2, -3
"""Numbers of the templates that are made here; the session's own are numbered from 0."""
_TAKEN = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
"""The types of which each device can take elements."""


def is_selection(signature: Signature) -> bool:
    """Whether an operation selects one element of a list by a number."""
    return signature.template.operator == "aten::select.int" and len(signature.operands[0].size) == 1 and (
        signature.operands[0].dtype in _TAKEN)


def index_read_by(node: Node, slot: Slot) -> Slot | None:
    """Return the tensor whose only element a node reads as a whole number; ``None`` if it reads none."""
    if slot not in node.outputs or node.signature.template.operator != "aten::_local_scalar_dense":
        return None
    spec = node.signature.operands[0]
    return node.inputs[0] if spec.dtype is torch.int64 and not spec.size else None


def selecting(node: Node, index: Slot, numbers: Iterator[int]) -> tuple[Node, Node]:
    """Return operations with the result of a selection, whose number is the value of a tensor.

    They cannot fail: a number that is too large, for which the program will fail, selects any element.

    Args:
        node: The selection.
        index: The tensor, without dimensions.
        numbers: Gives numbers to values.
    """
    spec = node.signature.operands[0]
    number = next(numbers)
    wrapping, taking = _signatures(spec)
    within = Slot(number, number)
    return (Node(wrapping, (index,), (within,), (spec.size[0],)),
            Node(taking, (node.inputs[0], within), node.outputs, ()))


@lru_cache(256)
def _signatures(spec: TensorSpec) -> tuple[Signature, Signature]:
    made = [TensorSpec(torch.Size(()), (), 0, dtype, spec.device) for dtype in (torch.int64, spec.dtype)]
    wrapping, taking = (Template(facts.name, facts.digest, (TensorArgument(), argument)) for facts, argument in (
        (facts_of(torch.ops.aten.remainder.Scalar), NumberArgument()),
        (facts_of(torch.ops.aten.take.default), TensorArgument())))
    return (Signature(wrapping, _REMAINDER_NUMBER, (made[0],), (-1,), (), is_random=False, operands=(made[0],)),
            Signature(taking, _TAKE_NUMBER, (made[1],), (-1,), (), is_random=False, operands=(spec, made[0])))
