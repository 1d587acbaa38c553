"""Checks results: strided tensors only, which share no memory with operands unless the operator's schema says so.

A kernel's other results refer to memory in ways that no check of a later call would see: a sparse tensor by indices
that may still be a tensor of the caller, a tensor that shares memory with an operand by a view that no schema declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import attrs
import torch

from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.spec import tensors_in
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("ResultCheck", "is_value", "no_value", "result_check_of")

_Tensor, _STRIDED, _LISTS = torch.Tensor, torch.strided, (list, tuple)
_owners: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 3)
"""Counts a storage's owners. Without it, each result is compared with each operand."""
_RETURN_THEIR_ARGUMENT = frozenset({"aten::lift", "aten::_to_cpu"})
"""PyTorch's own that do so unsaid."""
_ONE_OWNER = 2
"""A tensor and the Python object that asks."""


def is_value(result: Any) -> bool:
    """Whether a result may become a value: everything but a tensor that is no strided one."""
    return not isinstance(result, _Tensor) or (
        result.layout is _STRIDED and not (result.is_nested or result.is_quantized))


@attrs.frozen(eq=False)
class ResultCheck:
    """Checks the results of one operator's calls.

    Attributes:
        name: The operator.
        is_new: For each return: whether it must not share memory with an argument.
    """

    name: str
    is_new: tuple[bool, ...]

    def __call__(self, returned: Any, arguments: Iterable[Any]) -> None:
        """Check a call's results.

        Raises:
            RuntimeError: A result is not strided, or shares memory with an argument, and must not become a value.
        """
        if not self.is_new:
            return
        for result, is_new in zip((returned,) if len(self.is_new) == 1 else returned, self.is_new, strict=True):
            if not (type(result) is _Tensor and result.layout is _STRIDED and not result.is_nested
                    and not result.is_quantized and (not is_new or _is_owner(result, arguments))):
                # Hardly ever. It takes longer, and finds out more.
                self._expect(result if isinstance(result, (list, tuple)) else (result,), arguments, are_new=is_new)

    def of_values(self, values: Iterable[Any], arguments: Iterable[Any]) -> None:
        """Check some of a call's new results, in a flat list; see `__call__`."""
        self._expect(values, arguments, are_new=all(self.is_new))

    def _expect(self, values: Iterable[Any], arguments: Iterable[Any], *, are_new: bool) -> None:
        for value in values:
            if not is_value(value):
                raise RuntimeError(no_value(self.name, value))
            if are_new and isinstance(value, _Tensor) and _shares(value, arguments):
                raise RuntimeError(f"{self.name} gives a tensor that shares memory with an operand, and its schema "
                                   "does not say so: it becomes no value here.")


def no_value(name: str, result: torch.Tensor) -> str:
    """Say why a result cannot become a value."""
    return f"{name} gives a tensor of the layout {result.layout}, nested or quantized: only strided ones become values."


def _is_owner(value: torch.Tensor, arguments: Iterable[Any]) -> bool:
    """Whether a tensor is no argument, and has a storage that no other tensor has."""
    if _owners(value.untyped_storage()._cdata) > _ONE_OWNER:
        return False
    for argument in arguments:
        if argument is value or (type(argument) in _LISTS and any(member is value for member in argument)):
            return False
    return True


def _shares(value: torch.Tensor, arguments: Iterable[Any]) -> bool:
    storage = value.untyped_storage()
    return storage.nbytes() > 0 and any(
        tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors_in(arguments))


@cache
def result_check_of(name: str) -> ResultCheck:
    """Return the check for an operator's results.

    A composite may return its argument or a view of it, and so does an operator that is called unsafe.
    """
    facts = facts_of(operator_named(name))
    is_unsafe = name.partition("::")[2].lstrip("_").startswith("unsafe_")
    may_share = facts.is_composite or is_unsafe or name in _RETURN_THEIR_ARGUMENT
    return ResultCheck(name, tuple(
        kind in (ReturnKind.TENSOR, ReturnKind.LIST) and not alias and not may_share
        for kind, alias in zip(facts.returns, facts.aliases, strict=True)))
