"""A call of a compiled graph as one operation of local autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch
from torch.autograd.function import once_differentiable

from djinn_plugins.device.dynamo.plans import like_result

if TYPE_CHECKING:
    from djinn.ir.spec import TensorSpec


class GraphCall(Protocol):
    """One call: a recording, or a repetition of one."""

    def fetch(self) -> list[torch.Tensor]:
        """Download the results of the call."""

    def backward(self, incoming: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Download the gradients of the operands that can have gradients."""


@attrs.frozen
class Crossing:
    """Properties of a call that local autograd needs.

    Attributes:
        differentiable: Metadata of each result with a gradient, by position among the downloaded values.
        trained: Indices of the operands that may need gradients.
        guarded: Indices of the operands that must not be written before the backward pass.
    """

    differentiable: dict[int, TensorSpec]
    trained: list[int]
    guarded: list[int]


def fetch(call: GraphCall, crossing: Crossing, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Execute a call, within local autograd if it has gradients."""
    if not crossing.differentiable:
        return call.fetch()
    guarded = [operands[index] for index in crossing.guarded]
    trained = [operands[index] for index in crossing.trained]
    made: Sequence[torch.Tensor] = _Remotely.apply(  # type: ignore[no-untyped-call]  # untyped there
        call, crossing, guarded, *trained)
    return made


class _Remotely(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        call, crossing, guarded, *_ = arguments
        home = call.fetch()
        ctx.call, ctx.crossing = call, crossing
        ctx.save_for_backward(*guarded)
        ctx.mark_non_differentiable(*(tensor for position, tensor in enumerate(home)
                                      if position not in crossing.differentiable))
        return tuple(home)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # Only for the check: this raises if an operand has been written since.
        _ = ctx.saved_tensors
        call, crossing = ctx.call, ctx.crossing
        if call is None:
            raise RuntimeError("Trying to backward through the graph a second time (or directly access saved tensors "
                               "after they have already been freed). Specify retain_graph=True if you need to backward "
                               "through the graph a second time.")
        incoming = [like_result(spec, gradients[position]) for position, spec in crossing.differentiable.items()]
        found = call.backward(incoming)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None
        return (None, None, None, *found)
