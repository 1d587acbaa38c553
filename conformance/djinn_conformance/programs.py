"""Recorded calls, and programs assembled from them without the kernel's own recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from djinn.ir.program import (
    Argument,
    ConstantArgument,
    ListArgument,
    NumberArgument,
    Program,
    Step,
    Template,
    TensorArgument,
    TorchArgument,
)
from djinn.ir.schema import ReturnKind, facts_of
from djinn_plugins.common.calls.program_check import check_program
from djinn_plugins.common.operators.operators import operator_named

__all__ = (
    "RecordedCall",
    "Recording",
    "Ref",
    "RunnableProgram",
    "assemble",
    "call",
    "fill",
    "new_results",
    "numbers_of",
    "pieces",
    "refs_in",
    "written_refs",
)


@attrs.frozen
class Ref:
    """Refers to a value of a recording: result ``index``, or input ``-1 - index`` if it is negative."""

    index: int


@attrs.frozen(repr=False)
class RecordedCall:
    """One recorded call; tensors among its arguments are `Ref`."""

    operator: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: int
    """How many new results it has."""

    def __repr__(self) -> str:
        shown = [_show(item) for item in self.args] + [f"{name}={_show(item)}" for name, item in self.kwargs.items()]
        return f"{self.operator.name()}({', '.join(shown)})"


def _show(item: Any) -> str:
    if isinstance(item, Ref):
        return f"r{item.index}" if item.index >= 0 else f"i{-1 - item.index}"
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_show, item))}]"
    return str(item).removeprefix("torch.")


@attrs.frozen(repr=False)
class Recording:
    """Calls in program order on given inputs."""

    inputs: tuple[torch.Tensor, ...]
    """CPU tensors in their state before the first call."""
    calls: tuple[RecordedCall, ...]

    @property
    def results(self) -> int:
        """Number of all results."""
        return sum(made.results for made in self.calls)

    def __repr__(self) -> str:
        inputs = ", ".join(f"i{index}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                           for index, tensor in enumerate(self.inputs))
        lines, produced = [], 0
        for made in self.calls:
            names = ", ".join(f"r{index}" for index in range(produced, produced + made.results))
            lines.append(f"{names} = {made}" if names else str(made))
            produced += made.results
        return f"{inputs}; {'; '.join(lines)}"


def call(name: str, *args: Any, results: int = 1, **kwargs: Any) -> RecordedCall:
    """Record a call by the operator's qualified name."""
    return RecordedCall(operator_named(name), args, kwargs, results)


def refs_in(item: Any) -> list[Ref]:
    """List the values that an argument refers to, in order."""
    if isinstance(item, Ref):
        return [item]
    if isinstance(item, (list, tuple)):
        return [ref for member in item for ref in refs_in(member)]
    return [ref for member in item.values() for ref in refs_in(member)] if isinstance(item, Mapping) else []


def written_refs(made: RecordedCall) -> list[Ref]:
    """List the values that a call writes."""
    facts = facts_of(made.operator)
    named = [*zip(facts.argument_names, made.args, strict=False), *made.kwargs.items()]
    return [ref for name, item in named if name in facts.written for ref in refs_in(item)]


def fill(item: Any, value_of: Callable[[Ref], Any], device: torch.device) -> Any:
    """Replace references by values and devices by ``device``."""
    if isinstance(item, Ref):
        return value_of(item)
    if isinstance(item, torch.device):
        return device
    if isinstance(item, (list, tuple)):
        return [fill(member, value_of, device) for member in item]
    return {key: fill(member, value_of, device) for key, member in item.items()} if isinstance(item, Mapping) else item


def new_results(operator: torch._ops.OpOverload, returned: Any) -> list[Any]:
    """List the new results of a call in the numbering of programs.

    Written arguments do not count, lists count with their length, and an absent tensor counts.
    """
    kinds = facts_of(operator).returns
    values = () if not kinds else (returned,) if len(kinds) == 1 else returned
    results: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind is ReturnKind.LIST:
            results += value
        elif kind is not ReturnKind.WRITTEN:
            results.append(value)
    return results


def _form(item: Any) -> Argument:
    if isinstance(item, Ref):
        return TensorArgument()
    if item is None or isinstance(item, (bool, str)):
        return ConstantArgument(item)
    if isinstance(item, (int, float, complex)):
        return NumberArgument()
    if isinstance(item, (list, tuple)):
        if item and all(type(member) is type(item[0]) and isinstance(member, (int, float)) for member in item):
            return NumberArgument() if not isinstance(item[0], bool) else ListArgument(tuple(map(_form, item)))
        return ListArgument(tuple(_form(member) for member in item))
    if isinstance(item, torch.device):
        return TorchArgument("device", "")
    for kind, name in ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format")):
        if isinstance(item, kind):
            return TorchArgument(name, str(item).removeprefix("torch."))
    raise TypeError(f"{type(item).__name__} cannot be an argument of a program")


def numbers_of(form: Argument, item: Any) -> list[Any]:
    """List the numbers that are lifted from an argument."""
    if isinstance(form, NumberArgument):
        return [list(item) if isinstance(item, (list, tuple)) else item]
    if isinstance(form, ListArgument):
        return [number for inner, member in zip(form.items, item, strict=True) for number in numbers_of(inner, member)]
    return []


@attrs.frozen
class RunnableProgram:
    """A program with everything needed for one run."""

    program: Program
    numbers: tuple[Any, ...]
    inputs: tuple[int, ...]
    """The recording's indices of its inputs."""
    outputs: tuple[int, ...]
    """The recording's indices of its kept results."""
    first_step: int
    """Position of its first step within the recording."""


def assemble(recording: Recording, start: int, stop: int, keep: Iterable[int]) -> RunnableProgram:
    """Convert the calls ``start`` to ``stop`` to a program.

    Args:
        recording: The calls.
        start: First call.
        stop: The call after the last one.
        keep: The recording's indices of results to keep; those of other calls are ignored.
    """
    before = sum(made.results for made in recording.calls[:start])
    made_here = sum(made.results for made in recording.calls[start:stop])
    templates: dict[Template, int] = {}
    steps: list[Step] = []
    inputs: dict[int, int] = {}
    numbers: list[Any] = []

    def operand(ref: Ref) -> int:
        if ref.index >= before:
            return ref.index - before
        return -1 - inputs.setdefault(ref.index, len(inputs))

    for made in recording.calls[start:stop]:
        facts = facts_of(made.operator)
        arguments = tuple(_form(item) for item in made.args)
        keywords = tuple((name, _form(item)) for name, item in made.kwargs.items())
        template = Template(facts.name, facts.digest, arguments, keywords)
        for form, item in zip((*arguments, *(form for _, form in keywords)), (*made.args, *made.kwargs.values()),
                              strict=True):
            numbers += numbers_of(form, item)
        operands = tuple(operand(ref) for ref in refs_in([*made.args, *made.kwargs.values()]))
        steps.append(Step(templates.setdefault(template, len(templates)), operands, made.results))
    kept = sorted(index for index in set(keep) if before <= index < before + made_here)
    program = Program(tuple(templates), tuple(steps), len(inputs), tuple(index - before for index in kept))
    check_program(program)
    return RunnableProgram(program, tuple(numbers), tuple(inputs), tuple(kept), start)


def pieces(recording: Recording, cuts: Sequence[int], keep: Iterable[int]) -> list[RunnableProgram]:
    """Convert a recording to several programs that pass values on to each other.

    Args:
        recording: The calls.
        cuts: Positions of calls that begin a new program.
        keep: Indices of the results needed at the end.
    """
    bounds = [0, *sorted(set(cuts) - {0, len(recording.calls)}), len(recording.calls)]
    made = []
    for start, stop in pairwise(bounds):
        later = [ref.index for after in recording.calls[stop:] for ref in refs_in([after.args, after.kwargs])]
        made.append(assemble(recording, start, stop, [*keep, *later]))
    return made
