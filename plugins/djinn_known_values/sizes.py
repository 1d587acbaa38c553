"""Sizes that depend on data, computed from the integers and masks that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.messages import Description
from djinn.wire.tensors import DTYPE_NAMES
from djinn_known_values.operators import mask_of
from djinn_known_values.values import KnownValues

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
        mask = self._mask
        if mask is None:
            return self.known.describe(self.slots) if self.is_cpu else None
        found = self.known.read([mask])
        if found is None:
            return None
        # The chosen elements lie one after the other, on each device.
        size = (int(torch.count_nonzero(found[0])),)
        return [Description(DTYPE_NAMES[self.node.signature.operands[0].dtype], size, (1,), 0)]

    def lacking(self) -> list[Slot]:
        """List what has to be fetched so that there is an answer; nothing if it is large, or not known to suffice."""
        mask = self._mask
        if mask is not None:
            return [mask] if self.known.is_small(self.node.signature.operands[1]) else []
        # The number of positions is asked for alone: what is read after it comes with that answer (`Companions`).
        if not self.is_cpu or self.node.signature.template.operator == "aten::nonzero":
            return []
        return [value.slot for value in self.known.lacking(self.slots[0])]

    @property
    def _mask(self) -> Slot | None:
        return mask_of(self.node) if list(self.slots) == list(self.node.outputs) else None
