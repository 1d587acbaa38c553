"""Divisions of integers by tensors: eager refuses a zero at its line, and metadata does not show it.

Where the client knows the divisor, a call that divides by zero is carried out at once. What the executor's device does
then is eager's: a CPU raises, a GPU gives a number. Divisors that are numbers are
`djinn_plugins.device.shapes.refusals`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from djinn.kinds.backend_wrapper import BackendWrapper
from djinn.kinds.interceptor import Handler
from djinn.record.tensor import LazyTensor
from djinn_plugins.device.interceptor.overlaps import ask, record_writing

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("HANDLERS",)

aten = torch.ops.aten


def _divide(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a division be recorded, unless the client knows that a divisor is zero."""
    divided, divisor = args[:2]
    if type(divisor) is not LazyTensor or not (_is_whole(divided) and _is_whole(divisor)) or (
            kwargs.get("rounding_mode", "") is None or not isinstance(session.backend, BackendWrapper)):
        return NotImplemented
    with session.lock:
        known = session.backend.known(divisor._value.slot)
    if known is None or bool(known.all()):
        return NotImplemented
    return ask(session, operator, args, kwargs)


def _is_whole(item: Any) -> bool:
    """Whether an operand is integers of the device, or an integer."""
    if isinstance(item, torch.Tensor):
        return type(item) is LazyTensor and not (item.dtype.is_floating_point or item.dtype.is_complex)
    return isinstance(item, int)


def _divide_in_place(session: Session, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a division be recorded that writes its first argument, unless eager may refuse it."""
    made = _divide(session, operator, args, kwargs)
    return record_writing(session, operator, args, kwargs) if made is NotImplemented else made


HANDLERS: Mapping[torch._ops.OpOverload, Handler] = {
    **dict.fromkeys((
        aten.floor_divide.default, aten.floor_divide.out, aten.div.Tensor_mode, aten.div.out_mode,
        aten.remainder.Tensor, aten.remainder.Tensor_out, aten.remainder.Scalar_Tensor, aten.fmod.Tensor,
        aten.fmod.Tensor_out), _divide),
    **dict.fromkeys((
        aten.floor_divide_.Tensor, aten.div_.Tensor_mode, aten.remainder_.Tensor, aten.fmod_.Tensor), _divide_in_place),
}
