"""Checks that the form of a call matches its operator's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from djinn.errors import ProtocolError
from djinn.ir.program import (
    Argument,
    ConstantArgument,
    ListArgument,
    NumberArgument,
    Template,
    TensorArgument,
    TorchArgument,
)
from djinn.ir.schema import SchemaFacts
from djinn.wire.tensors import DTYPES

__all__ = ("check_form", "count_numbers", "number_kinds")

_NAMES: Mapping[str, frozenset[str]] = {
    "dtype": frozenset(DTYPES),
    "layout": frozenset(("strided",)),
    "memory_format": frozenset(("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")),
    "device": frozenset(("",)),
}
_CONSTANTS = {"ScalarType": "dtype", "Layout": "layout", "MemoryFormat": "memory_format", "Device": "device"}
"""Kinds of PyTorch constants, by their type in schemas."""
_NUMERIC = frozenset(("int", "float", "number", "bool", "SymInt", "complex"))
MAX_TEXT = 1024


def check_form(
    template: Template, operator: torch._ops.OpOverload, facts: SchemaFacts
) -> tuple[tuple[str, Argument], ...]:
    """Check a template against the schema.

    Returns:
        The forms of its arguments, by name and in order.

    Raises:
        ProtocolError: There are too many arguments or too few, one is given twice, or one has another type.
    """
    name = facts.name
    schema = {argument.name: argument for argument in operator._schema.arguments}
    if len(template.arguments) > len(facts.argument_names):
        raise ProtocolError(f"{name} takes {len(facts.argument_names)} arguments, not {len(template.arguments)}.")
    given = [*zip(facts.argument_names, template.arguments, strict=False), *template.keywords]
    for position, (argument, form) in enumerate(given):
        if argument not in schema:
            raise ProtocolError(f"{name} has no argument {argument[:40]!r}.")
        described = schema[argument]
        if position < len(template.arguments) and described.kwarg_only:
            raise ProtocolError(f"{name} takes {argument} by name only.")
        if not _reader(str(described.real_type))(form):
            raise ProtocolError(f"{name} takes {described.real_type} as {argument}, and is given {_said(form)}.")
    names = [argument for argument, _ in given]
    if len(set(names)) != len(names):
        raise ProtocolError(f"{name} is given an argument twice.")
    missing = [argument.name for argument in operator._schema.arguments
               if argument.name not in names and not argument.has_default_value()]
    if missing:
        raise ProtocolError(f"{name} lacks {', '.join(missing)}.")
    return tuple(given)


def _said(form: Argument) -> str:
    if isinstance(form, TorchArgument):
        return f"the {form.kind[:20]} {form.name[:40]!r}"
    if isinstance(form, ConstantArgument):
        return f"the constant {str(form.value)[:40]!r}"
    return {TensorArgument: "a tensor", NumberArgument: "a number", ListArgument: "a list"}[type(form)]


@cache
def _reader(kind: str) -> Callable[[Argument], bool]:
    """Return a predicate for the argument forms that match a schema type."""
    if kind.startswith("Optional["):
        inner = _reader(kind.removeprefix("Optional[").removesuffix("]"))
        return lambda form: (isinstance(form, ConstantArgument) and form.value is None) or inner(form)
    if kind.startswith("List["):
        item = _reader(kind.removeprefix("List[").removesuffix("]"))
        is_numeric = kind.removeprefix("List[").removesuffix("]") in _NUMERIC
        return lambda form: all(map(item, form.items)) if isinstance(form, ListArgument) else is_numeric and item(form)
    if kind in _CONSTANTS:
        constant = _CONSTANTS[kind]
        return lambda form: (
            isinstance(form, TorchArgument) and form.kind == constant and form.name in _NAMES[constant])
    if kind == "str":
        return lambda form: (
            isinstance(form, ConstantArgument) and type(form.value) is str and len(form.value) <= MAX_TEXT)
    if kind == "Tensor":
        # PyTorch accepts a number in place of a tensor without dimensions.
        return lambda form: isinstance(form, (TensorArgument, NumberArgument)) or _is_bool(form)
    if kind in _NUMERIC:
        # And vice versa.
        return lambda form: isinstance(form, (TensorArgument, NumberArgument)) or _is_bool(form)
    return lambda form: False


def _is_bool(form: Argument) -> bool:
    return isinstance(form, ConstantArgument) and type(form.value) is bool


def count_numbers(form: Argument) -> int:
    """Return how many numbers an argument takes."""
    if isinstance(form, ListArgument):
        return sum(map(count_numbers, form.items))
    return int(isinstance(form, NumberArgument))


def number_kinds(given: tuple[tuple[str, Argument], ...], operator: torch._ops.OpOverload) -> list[bool]:
    """Return for each number of a call whether its schema permits a non-integer."""
    kinds = {argument.name: str(argument.type) for argument in operator._schema.arguments}
    made: list[bool] = []
    for name, form in given:
        is_whole = "int" in kinds[name] or kinds[name] in ("bool", "List[bool]")
        made += [not is_whole] * count_numbers(form)
    return made
