"""Canonical programs: pieces of tape without names, shapes and numbers.

These types are sent over the wire, so they are `msgspec.Struct`: decoding checks every field's type, and a tagged union
decodes to the right class without any class name on the wire.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import msgspec

from djinn.errors import ProtocolError

MAX_STEPS = 1_000_000
MAX_NESTING = 4


class TensorArgument(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The next operand of the step."""


class NumberArgument(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """The next number of the run: an integer, a real or complex number, or a list of them."""


class ConstantArgument(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """A constant that is part of the structure."""

    value: None | bool | str


class TorchArgument(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """A constant of PyTorch: ``("dtype", "float32")``, ``("layout", "strided")``, ``("device", "")``, ..."""

    kind: str
    name: str


class ListArgument(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A list of arguments."""

    items: tuple[Argument, ...]


Argument: TypeAlias = TensorArgument | NumberArgument | ConstantArgument | TorchArgument | ListArgument


class Template(msgspec.Struct, frozen=True, array_like=True):
    """One operator and the form of its arguments.

    Attributes:
        operator: Qualified overload, ``namespace::name.overload``.
        digest: Digest of the operator's schema in the client's PyTorch release.
        arguments: Positional arguments.
        keywords: Keyword arguments, in order.
        default_dtype: PyTorch's default dtype when the call was recorded, if results depend on it.
        switches: PyTorch's process-wide switches that were not at their defaults then, by name, and their values.
    """

    operator: str
    digest: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    default_dtype: str = ""
    switches: tuple[tuple[str, str], ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One call.

    Attributes:
        template: Index into the program's templates.
        operands: For each tensor argument, in order: a result's index, or ``-1 - i`` for input ``i``.
        results: How many results the call has; their numbering continues that of earlier steps. A returned list counts
            with its length.
    """

    template: int
    operands: tuple[int, ...]
    results: int


class Program(msgspec.Struct, frozen=True, array_like=True):
    """A position-independent piece of tape.

    Attributes:
        templates: Distinct operator calls.
        steps: Calls in program order.
        inputs: How many values it reads from outside.
        keep: Indices of the results that outlive it, in increasing order.
    """

    templates: tuple[Template, ...]
    steps: tuple[Step, ...]
    inputs: int
    keep: tuple[int, ...]


def count_tensors(argument: Argument, depth: int = 0) -> int:
    """Count the operands that an argument takes.

    Raises:
        ProtocolError: Lists are nested more deeply than any operator needs.
    """
    if depth > MAX_NESTING:
        raise ProtocolError(f"Arguments nested more than {MAX_NESTING} deep.")
    if isinstance(argument, TensorArgument):
        return 1
    if isinstance(argument, ListArgument):
        return sum(count_tensors(item, depth + 1) for item in argument.items)
    return 0


Number: TypeAlias = Any
"""An int, float, complex, or list of these: one lifted number of a run. Complex is sent as a two-element map."""


@attrs.frozen
class ProgramLayout:
    """A piece of tape in canonical form: its structure, its variable parts, and the numbers in wire format."""

    key: tuple[int, ...]
    inputs: tuple[int, ...]
    numbers: list[Any]
    keep: tuple[int, ...]
    outputs: tuple[int, ...]
