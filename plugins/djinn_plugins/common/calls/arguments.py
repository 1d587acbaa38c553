"""The arguments of a program's calls: PyTorch's constants by their names, and the forms filled with values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from djinn.errors import ProtocolError
from djinn.ir.program import Argument, ConstantArgument, ListArgument, NumberArgument, TensorArgument, TorchArgument
from djinn.wire.tensors import dtype_named

__all__ = ("Form", "Resolved", "fill", "resolve")

_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}
_CONSTANTS: dict[str, dict[str, Any]] = {"layout": _LAYOUTS, "memory_format": _MEMORY_FORMATS}


@attrs.frozen
class Resolved:
    """A resolved PyTorch constant."""

    value: Any


Form: TypeAlias = Argument | Resolved
"""The form of an argument, with PyTorch's constants resolved."""


def resolve(argument: Argument, device: torch.device) -> Form:
    """Replace a PyTorch constant by its meaning here; logical devices mean this executor's.

    A list of constants is resolved item by item, one level deep at a time.

    Raises:
        ProtocolError: There is no such constant.
    """
    if isinstance(argument, ListArgument):
        items: Any = tuple(resolve(item, device) for item in argument.items)
        return ListArgument(items)
    if not isinstance(argument, TorchArgument):
        return argument
    if argument.kind == "device":
        return Resolved(device)
    if argument.kind == "dtype":
        return Resolved(dtype_named(argument.name))
    table = _CONSTANTS.get(argument.kind, {})
    if argument.name not in table:
        raise ProtocolError(f"Unknown constant {argument.kind[:20]} {argument.name[:40]!r}.")
    return Resolved(table[argument.name])


def fill(
    arguments: Sequence[Form], keywords: Sequence[tuple[str, Form]], operands: Sequence[Any], numbers: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Fill a call's form with operands and numbers."""
    tensors, values = iter(operands), iter(numbers)
    made = [_value(argument, tensors, values) for argument in arguments]
    return made, {name: _value(argument, tensors, values) for name, argument in keywords}


def _value(argument: Any, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
    if isinstance(argument, TensorArgument):
        return next(tensors)
    if isinstance(argument, NumberArgument):
        return next(numbers)
    if isinstance(argument, (ConstantArgument, Resolved)):
        return argument.value
    if isinstance(argument, ListArgument):
        return [_value(item, tensors, numbers) for item in argument.items]
    raise TypeError(f"unknown argument form {type(argument).__name__}")
