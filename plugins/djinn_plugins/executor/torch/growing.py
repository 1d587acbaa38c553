"""Values that grow are written into spare room.

A cache of keys or values grows by ``cat([cache, new])`` for each token, which copies the whole cache. Here the result
lies in memory with spare room behind it, and the next such call writes only the new rows. The result is then a view
with gaps, so it is given only to operators that compute the same bits from it: attention, and ``cat`` itself. Before
any other operator reads or writes such a value, it moves to separate memory, laid out as by ``cat``.

Old values stay valid: only the rows behind the longest value in use are written.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from djinn.ir.program import ListArgument, Program, Step, Template, TensorArgument
from djinn_plugins.common.calls.binding import BoundCall
from djinn_plugins.common.kinds.executor import CompiledProgram

__all__ = ("CopiedGrowth", "GrowingValues", "Growth", "growth_of", "with_joins")

LEAST_BYTES = 2**17
"""Copying less than this costs no more than keeping room."""
_CACHE_LINE_BYTES = 64
"""Rows of whole cache lines have the same alignment with and without gaps, and kernels depend on it."""
_DIMENSIONS = 4
"""Batch, heads, positions and features: the form that fused attention reads with gaps."""
_JOIN = "aten::cat"
_READERS = frozenset(("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
                      "djinn::scaled_dot_product_attention"))
"""Operators whose second and third operands may have gaps."""


@attrs.frozen
class Growth:
    """Where a program lets values grow.

    Attributes:
        steps: The calls of ``cat`` whose results may have gaps, by position.
        inputs: Inputs that may have gaps, by position.
    """

    steps: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()


@attrs.frozen
class CopiedGrowth:
    """A program before its values may grow: each ``cat`` of it copies.

    Attributes:
        program: The program.
        calls: Its bound templates.
        inputs: Positions of the inputs that would grow.
    """

    program: Program
    calls: Sequence[BoundCall]
    inputs: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, calls: Sequence[BoundCall], steps: frozenset[int]) -> Self | None:
        """Return the program, unless one of the steps would let grow what the program itself computes."""
        grown = {program.steps[position].operands[0] for position in steps}
        if not grown or max(grown) >= 0:
            return None
        return cls(program, calls, tuple(sorted(-1 - operand for operand in grown)))

    def is_enough_for(self, inputs: Sequence[Any]) -> bool:
        """Whether the inputs are so small that spare room would save nothing."""
        return all(inputs[index].numel() * inputs[index].element_size() < LEAST_BYTES for index in self.inputs)


def growth_of(program: Program) -> Growth:
    """Find the values that may have gaps: only attention and ``cat`` use them."""
    needs_dense: set[int] = set()
    for step in program.steps:
        template = program.templates[step.template]
        allowed = _may_have_gaps(template, step)
        needs_dense.update(operand for position, operand in enumerate(step.operands) if position not in allowed)
    steps, produced = set[int](), 0
    for position, step in enumerate(program.steps):
        if _joins_two(program.templates[step.template], step) and produced not in needs_dense:
            steps.add(position)
        produced += step.results
    return Growth(frozenset(steps), frozenset(
        index for index in range(program.inputs) if -1 - index not in needs_dense))


def _may_have_gaps(template: Template, step: Step) -> range:
    if template.operator == _JOIN:
        return range(len(step.operands))
    is_attention = template.operator in _READERS and len(template.arguments) > 2 and all(
        isinstance(argument, TensorArgument) for argument in template.arguments[:3])
    return range(1, 3) if is_attention else range(0)


def _joins_two(template: Template, step: Step) -> bool:
    first = template.arguments[0] if template.arguments else None
    return template.operator == _JOIN and isinstance(first, ListArgument) and len(step.operands) == 2


def with_joins(
    program: Program, calls: Sequence[BoundCall], steps: frozenset[int], join: Callable[[BoundCall], BoundCall]
) -> tuple[Program, list[BoundCall]]:
    """Return the program with other calls for some of its steps; all positions stay the same."""
    templates, made, other = list(program.templates), list(calls), dict[int, int]()
    changed = list(program.steps)
    for position in sorted(steps):
        step = program.steps[position]
        if step.template not in other:
            other[step.template] = len(templates)
            templates.append(program.templates[step.template])
            made.append(join(calls[step.template]))
        changed[position] = Step(other[step.template], step.operands, step.results)
    return Program(tuple(templates), tuple(changed), program.inputs, program.keep), made


@attrs.define(eq=False)
class _Room:
    """Memory with room along one dimension, and the values that lie at its start."""

    memory: torch.Tensor
    dim: int
    values: list[tuple[int, weakref.ref[torch.Tensor]]] = attrs.field(factory=list)

    def used(self) -> int:
        """Return the length of the longest value that is still in use."""
        self.values = [(length, value) for length, value in self.values if value() is not None]
        return max((length for length, _ in self.values), default=0)

    def value(self, length: int) -> torch.Tensor:
        """Return the value of a length."""
        made = self.memory.narrow(self.dim, 0, length)
        self.values.append((length, weakref.ref(made)))
        return made


class GrowingValues:
    """The values of one session that lie in spare room; see `djinn_plugins.common.kinds.executor.SpareRoom`.

    Args:
        lock: Held while a program runs.
        least_bytes: Smaller values are copied.
    """

    def __init__(self, lock: threading.RLock, *, least_bytes: int = LEAST_BYTES) -> None:
        self._lock = lock
        self._least_bytes = least_bytes
        self._rooms: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """By value: where it lies. ``None`` for a dense value that ``cat`` made, and may grow again."""
        self.joined = self.moved = 0
        """How often a value grew, and how often it had to be copied for that."""

    def admit(self, program: CompiledProgram) -> None:
        """Let a program write growing values into spare room."""
        grow = getattr(program, "grow", None)
        if grow is not None:
            grow(self._joining)

    def make_ready(self, program: CompiledProgram, inputs: Sequence[Any]) -> list[int]:
        """Move those inputs that a program does not read with gaps; return their positions."""
        if not self._rooms:
            return []
        allowed: frozenset[int] = getattr(program, "growth", Growth()).inputs
        return [index for index, value in enumerate(inputs) if index not in allowed and self.make_dense(value)]

    def make_dense(self, value: Any) -> bool:
        """Give a value separate memory, if it lies in spare room; return whether it did."""
        if not isinstance(value, torch.Tensor) or self._rooms.get(value) is None:
            return False
        with self._lock, torch.inference_mode():
            dense = value.clone(memory_format=torch.contiguous_format)
            value.set_(dense.untyped_storage(), 0, dense.size(), dense.stride())
            self._rooms[value] = None
        return True

    def _joining(self, call: BoundCall) -> BoundCall:
        return attrs.evolve(call, function=self._instead_of(call.function), grows=True)

    def _instead_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def join(tensors: list[Any], dim: int = 0) -> Any:
            made = self._grown(tensors, dim)
            if made is None:
                made = function(tensors, dim)
                if _may_grow(made, dim, self._least_bytes):
                    self._rooms[made] = None
            return made

        return join

    def _grown(self, tensors: list[Any], dim: int) -> torch.Tensor | None:
        """Write the second tensor behind the first; return ``None`` if that is not possible."""
        first, second = tensors
        if first not in self._rooms or not _continues(first, second, dim):
            return None
        place = dim % _DIMENSIONS
        before, after = first.shape[place], first.shape[place] + second.shape[place]
        room: _Room | None = self._rooms[first]
        if (not _may_grow(first, dim, self._least_bytes)) if room is None else room.dim != place:
            return None
        if room is None or room.used() != before or after > room.memory.shape[place]:
            room = _roomy(first, place, after)
            self.moved += 1
        room.memory.narrow(place, before, second.shape[place]).copy_(second)
        made = room.value(after)
        self._rooms[made] = room
        self.joined += 1
        return made


def _may_grow(tensor: Any, dim: int, least_bytes: int) -> bool:
    if type(tensor) is not torch.Tensor or tensor.dim() != _DIMENSIONS or not -_DIMENSIONS <= dim < _DIMENSIONS:
        return False
    row = tensor.element_size()
    for extent in tensor.shape[dim % _DIMENSIONS + 1 :]:
        row *= extent
    size_bytes = tensor.numel() * tensor.element_size()
    return row > 0 and not row % _CACHE_LINE_BYTES and size_bytes >= least_bytes and tensor.is_contiguous()


def _continues(first: torch.Tensor, second: Any, dim: int) -> bool:
    """Whether ``cat`` would give a contiguous tensor of the same dtype, and not raise."""
    if type(second) is not torch.Tensor or not -_DIMENSIONS <= dim < _DIMENSIONS:
        return False
    if second.dtype is not first.dtype or second.device != first.device or second.layout is not torch.strided:
        return False
    place = dim % _DIMENSIONS
    return not (second.is_conj() or second.is_neg()) and second.dim() == _DIMENSIONS and all(
        index == place or mine == theirs for index, (mine, theirs) in enumerate(zip(first.shape, second.shape,
                                                                                     strict=True)))


def _roomy(first: torch.Tensor, dim: int, needed: int) -> _Room:
    """Make room for a quarter more, with a copy of the value at its start."""
    size = list(first.shape)
    size[dim] = needed + needed // 4
    memory = torch.empty(size, dtype=first.dtype, device=first.device)
    memory.narrow(dim, 0, first.shape[dim]).copy_(first)
    return _Room(memory, dim)
