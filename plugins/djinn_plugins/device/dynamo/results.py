"""The results of a captured graph as ordinary tensors with the same aliasing as in eager mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import torch

from djinn.record.tensor import LazyTensor


@attrs.frozen
class Constant:
    """A result that is not a tensor."""

    value: Any


@attrs.frozen
class GraphOperand:
    """An operand of the graph, itself."""

    index: int


@attrs.frozen
class View:
    """A view of an operand; the offset is relative to the operand's own."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    is_detached: bool


@attrs.frozen
class Fetched:
    """A downloaded tensor."""

    index: int


@attrs.frozen
class BlockView:
    """A view of a block that is downloaded because several results share it."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


Form: TypeAlias = Constant | GraphOperand | View | Fetched | BlockView


@attrs.define
class Results:
    """Forms of the results, and the values to download for them.

    Attributes:
        forms: One for each result.
        wanted: Lazy tensors of the recording to download, in the order of indices.
    """

    forms: list[Form]
    wanted: list[LazyTensor]

    def arrange(self, home: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[Any]:
        """Build the results from the downloaded tensors and the call's own operands."""
        return [_made(form, home, operands) for form in self.forms]

    @property
    def views(self) -> list[View]:
        """The results that are views of operands."""
        return [form for form in self.forms if isinstance(form, View)]


def _made(form: Form, home: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(form, Fetched):
        return home[form.index]
    if isinstance(form, Constant):
        return form.value
    if isinstance(form, GraphOperand):
        return operands[form.index]
    if isinstance(form, BlockView):
        return home[form.index].as_strided(form.size, form.stride, form.storage_offset)
    base = operands[form.index].detach() if form.is_detached else operands[form.index]
    return base.as_strided(form.size, form.stride, base.storage_offset() + form.storage_offset)


def sort_out(returned: Sequence[Any], leaves: Sequence[LazyTensor], *, differentiable: bool) -> Results:
    """Determine how results are rebuilt locally.

    Args:
        returned: The return values of the graph during recording.
        leaves: The operands that it was recorded with.
        differentiable: Whether some results have gradients. Then each of them is downloaded separately, because
            autograd forbids writes to results of one function that share memory.
    """
    storages = {leaf._value.slot.storage: index for index, leaf in enumerate(leaves)}
    lazy = {id(result): result for result in returned if isinstance(result, LazyTensor)}
    fresh = [result for result in lazy.values() if result._value.slot.storage not in storages]
    sharing = Counter((result._value.slot.storage, result.dtype) for result in fresh)
    made: dict[int, Form] = {}
    blocks: dict[int, Fetched] = {}
    wanted: list[LazyTensor] = []
    for result in lazy.values():
        slot, spec = result._value.slot, result._value.spec
        index = storages.get(slot.storage)
        if index is not None:
            geometry = (tuple(spec.size), spec.stride, spec.storage_offset)
            made[id(result)] = GraphOperand(index) if result is leaves[index] else View(
                index, *geometry, spec.dtype, is_detached=not result.requires_grad)
        elif differentiable or sharing[slot.storage, spec.dtype] == 1:
            made[id(result)] = Fetched(len(wanted))
            wanted.append(result)
        else:
            family = [other for other in fresh if other._value.slot.storage == slot.storage]
            begin, end = _extent(family)
            if slot.storage not in blocks:
                blocks[slot.storage] = Fetched(len(wanted))
                wanted.append(result.as_strided((end - begin,), (1,), begin))  # type: ignore[arg-type]  # stays lazy
            made[id(result)] = BlockView(blocks[slot.storage].index, tuple(spec.size), spec.stride,
                                         spec.storage_offset - begin)
    return Results([made[id(r)] if isinstance(r, LazyTensor) else Constant(r) for r in returned], wanted)


def _extent(tensors: Sequence[LazyTensor]) -> tuple[int, int]:
    """Return the range of elements of their storage that the tensors cover."""
    specs = [tensor._value.spec for tensor in tensors]
    ends = [spec.storage_offset + 1 + sum((extent - 1) * step for extent, step in zip(spec.size, spec.stride,
                                                                                   strict=True))
            for spec in specs if spec.numel]
    return min(spec.storage_offset for spec in specs), max(ends, default=0)
