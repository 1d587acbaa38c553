"""Matrix products that PyTorch executes differently depending on whether a gradient may be needed.

PyTorch may fold a product of a batch of matrices with one matrix into a product of two matrices. If that would copy the
larger operand, PyTorch checks whether the smaller one requires a gradient, even if none is recorded; and the two
variants round differently. The executor's tensors never require gradients, so such products are decomposed here.

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
    return max(first.dim(), second.dim()) > 2 and not (first.dim() >= second.dim() and first.is_contiguous())


def take_apart_if_needed(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a product be recorded whole, unless its variant depends on information that the executor does not have."""
    first, second = args[:2]
    if can_depend_on_gradient(first, second) and (first.requires_grad or second.requires_grad):
        return session.decompose(operator, args, kwargs)
    return NotImplemented


OPERATORS = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)


def handlers(session: Session) -> dict[torch._ops.OpOverload, Handler]:
    """Return the handlers of products that the session's classifier keeps whole."""
    return {operator: take_apart_if_needed for operator in OPERATORS if session.classifier.keep_whole(operator)}
