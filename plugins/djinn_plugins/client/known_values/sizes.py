"""Sizes that depend on data, computed from the integers and masks that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn.ir.program import ListArgument, TensorArgument
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.messages import Description
from djinn.wire.tensors import DTYPE_NAMES
from djinn_plugins.client.known_values.placing import usual_strides
from djinn_plugins.client.known_values.values import KnownValues

__all__ = ("SizesAsked",)


@attrs.frozen
class SizesAsked:
    """A program's wait for the metadata of results.

    Attributes:
        known: What the client knows.
        slots: The results, and the values that the operation writes.
        node: The operation.
        is_cpu: Whether the executor lays out results as the CPU does.
    """

    known: KnownValues
    slots: Sequence[Slot]
    node: Node
    is_cpu: bool

    def answer(self) -> list[Any] | None:
        """Return the metadata, if the client knows what it depends on."""
        deciding = self._deciding
        if not deciding:
            return self.known.describe(self.slots) if self.is_cpu else None
        found = self.known.read([self.node.inputs[place] for place in deciding])
        if found is None:
            return None
        sizes_of, _ = _DECIDED[self.node.signature.template.operator]
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                made = sizes_of(self.node, dict(zip(deciding, found, strict=True)))
        except Exception:  # noqa: BLE001  # the executor raises the error, if there is one
            return None
        if made is None or not (self.is_cpu or made.stride() == usual_strides(made.size())):
            return None
        return [Description(DTYPE_NAMES[made.dtype], tuple(made.size()), made.stride(), 0)]

    def lacking(self) -> list[Slot]:
        """List what has to be fetched so that there is an answer; nothing if it is large, or not known to suffice."""
        deciding = self._deciding
        if deciding:
            unknown = [place for place in deciding if self.known.read([self.node.inputs[place]]) is None]
            is_small = all(self.known.is_small(self.node.signature.operands[place]) for place in unknown)
            return [self.node.inputs[place] for place in unknown] if is_small else []
        # The number of positions is asked for alone: what is read after it comes with that answer (`Companions`).
        if not self.is_cpu or self.node.signature.template.operator == "aten::nonzero":
            return []
        return [value.slot for value in self.known.lacking(self.slots[0])]

    @property
    def _deciding(self) -> Sequence[int]:
        """The operands that alone decide what the metadata is; nothing if that is not known."""
        if list(self.slots) != list(self.node.outputs):
            return ()
        found = _DECIDED.get(self.node.signature.template.operator)
        return () if found is None else found[1](self.node.signature.operands)


def _index_of(node: Node, known: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """Describe the elements that masks and positions choose, without data."""
    base = node.signature.operands[0]
    _, positions = node.signature.template.arguments
    assert isinstance(positions, ListArgument)
    place, indices = 0, list[torch.Tensor | None]()
    for form in positions.items:
        if not isinstance(form, TensorArgument):
            indices.append(None)
            continue
        place += 1
        spec, mask = node.signature.operands[place], known.get(place)
        start = len(indices)
        if mask is None:
            indices.append(torch.empty(spec.size, dtype=spec.dtype, device="meta"))
        elif spec.size != base.size[start:start + len(spec.size)]:
            return None
        else:
            chosen = int(torch.count_nonzero(mask))
            indices += [torch.empty(chosen, dtype=torch.int64, device="meta") for _ in spec.size]
    made: torch.Tensor = torch.ops.aten.index.Tensor(
        torch.empty_strided(base.size, base.stride, dtype=base.dtype, device="meta"), indices)
    # For other tensors, the kernel chooses other strides than on meta.
    is_usual = base.stride == usual_strides(base.size) or (made.numel() and 1 not in (*base.size, *made.size()))
    return made if is_usual else None


def _selected_of(node: Node, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
    base, mask = node.signature.operands
    chosen = int(torch.count_nonzero(known[1].expand(torch.broadcast_shapes(base.size, mask.size))))
    return torch.empty(chosen, dtype=base.dtype, device="meta")


def _bins_of(node: Node, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
    weights = next((torch.zeros(spec.size, dtype=spec.dtype) for spec in node.signature.operands[1:]), None)
    return torch.bincount(known[0], weights, node.numbers[0] if node.numbers else 0)


def _repeats_of(node: Node, known: Mapping[int, torch.Tensor]) -> torch.Tensor:
    return torch.repeat_interleave(known[0], output_size=node.numbers[0] if node.numbers else None)


def _masks(operands: Sequence[TensorSpec]) -> list[int]:
    """List the masks among indices; nothing if bytes, which are masks, too, are among them."""
    if any(spec.dtype is torch.uint8 for spec in operands[1:]):
        return []
    return [place for place, spec in enumerate(operands) if place and spec.dtype is torch.bool]


_DECIDED: Mapping[str, tuple[Callable[[Node, Mapping[int, torch.Tensor]], torch.Tensor | None],
                             Callable[[Sequence[TensorSpec]], Sequence[int]]]] = {
    "aten::index.Tensor": (_index_of, _masks),
    "aten::masked_select": (_selected_of, _masks),
    "aten::bincount": (_bins_of, lambda _: (0,)),
    "aten::repeat_interleave.Tensor": (_repeats_of, lambda _: (0,)),
}
"""By operator: what the result is, except for its elements, and the operands that decide that."""
