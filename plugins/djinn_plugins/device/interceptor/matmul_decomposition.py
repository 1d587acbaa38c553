"""Matrix products that PyTorch executes differently depending on whether a gradient may be needed.

PyTorch may fold a product of a batch of matrices with one matrix into a product of two matrices. If that would copy the
larger operand, PyTorch checks whether the smaller one requires a gradient, even if none is recorded; and the two
variants round differently. The same holds for a batch times a batch of one matrix. The executor's tensors never require
gradients, so such products are decomposed here.

Source:
    ``should_fold`` of aten/src/ATen/native/LinearAlgebra.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from djinn.kinds.interceptor import Handler
from djinn.record.tensor import LazyTensor

if TYPE_CHECKING:
    from djinn.session.session import Session


def can_depend_on_gradient(first: Any, second: Any) -> bool:
    """Whether the result can depend on an operand's need for a gradient, for operands with this metadata."""
    if not isinstance(first, LazyTensor) or not isinstance(second, LazyTensor):
        return False
    small, large = sorted((first.dim(), second.dim()))
    if small > 2:
        return single(first, second) is not None
    return large > 2 and not (first.dim() == large and _is_folded_anyway(first))


def _is_folded_anyway(tensor: LazyTensor) -> bool:
    """Whether the strides allow it. PyTorch compares those of dimensions of size one, too, unlike elsewhere."""
    size, stride = tensor._value.spec.size, tensor._value.spec.stride
    return 0 in size or all(
        stride[position] == stride[position + 1] * size[position + 1] for position in range(len(size) - 2))


def single(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Return which operand is one matrix for several of the other one, if both have three dimensions.

    PyTorch takes it as a matrix if it requires a gradient, or is of a subclass, and repeats it otherwise.
    """
    if first.dim() != 3 or second.dim() != 3 or first.shape[0] == second.shape[0]:
        return None
    return next((position for position, operand in enumerate((first, second)) if operand.shape[0] == 1), None)


def take_apart_if_needed(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a product be recorded whole, unless its variant depends on information that the executor does not have."""
    first, second = args[:2]
    if not can_depend_on_gradient(first, second):
        return NotImplemented
    one = single(first, second)
    is_needed = first.requires_grad or second.requires_grad if one is None else args[one].requires_grad
    return session.decompose(operator, args, kwargs) if is_needed else NotImplemented


OPERATORS = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)


def handlers(session: Session) -> dict[torch._ops.OpOverload, Handler]:
    """Return the handlers of products that the session's classifier keeps whole."""
    return {operator: take_apart_if_needed for operator in OPERATORS if session.classifier.keep_whole(operator)}
