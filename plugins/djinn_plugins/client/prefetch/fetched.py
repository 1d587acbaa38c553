"""Values that were fetched before they were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.record.tensor import LazyTensor

__all__ = ("FetchedValues", "Key", "changes_nothing", "is_computed_now", "is_plain_view", "key_of", "read_by")

Key = tuple[int, TensorSpec]
"""A value, whichever tensor stands for it: its storage, and its place and form in it. Specs are interned."""

_HIDING_VIEWS = frozenset({"aten::_conj", "aten::_neg_view"})
"""Views with values of their own, which their specs do not show."""


def key_of(tensor: LazyTensor) -> Key:
    """Return the key of a tensor's value."""
    return tensor._value.slot.storage, tensor._value.spec


def is_plain_view(node: Node) -> bool:
    """Whether a node only names a part of a storage: it computes and changes nothing, and cannot fail."""
    signature = node.signature
    return (bool(signature.aliases) and min(signature.aliases) >= 0 and not signature.writes
            and not signature.is_random and signature.template.operator.partition(".")[0] not in _HIDING_VIEWS)


def _reads_number(node: Node) -> bool:
    """Whether a node reads the only element of a tensor, as ``item()`` does."""
    return node.signature.template.operator.partition(".")[0] == "aten::_local_scalar_dense"


def changes_nothing(node: Node) -> bool:
    """Whether fetched values are valid after a node."""
    return is_plain_view(node) or _reads_number(node)


def read_by(nodes: Sequence[Node], slot: Slot) -> Slot:
    """Return the tensor that the last node reads a number from; the slot itself if it is no such number."""
    last = nodes[-1] if nodes else None
    return last.inputs[0] if last is not None and slot in last.outputs and _reads_number(last) else slot


def is_computed_now(nodes: Sequence[Node], slot: Slot) -> bool:
    """Whether the last node that does not only read a number computes a value."""
    last = next((node for node in reversed(nodes[-2:]) if not _reads_number(node)), None)
    return last is not None and slot in last.outputs and not is_plain_view(last)


@attrs.define
class _Entry:
    tensor: torch.Tensor
    uses: int
    """How many tensors with this value are expected to be asked for."""


class FetchedValues:
    """A cache of fetched values; each is given away once.

    Attributes:
        size_bytes: Their size.
        fetched: How many were fetched.
        fetched_bytes: Their size.
        unused: How many of them were dropped.
        unused_bytes: Their size.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self.size_bytes = 0
        self.fetched = self.fetched_bytes = 0
        self.unused = self.unused_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def keep(self, keys: Sequence[Key], tensors: Iterable[torch.Tensor], uses: Sequence[int]) -> None:
        """Take over fetched tensors."""
        for key, tensor, count in zip(keys, tensors, uses, strict=True):
            self._entries[key] = _Entry(tensor, count)
            self.size_bytes += tensor.nbytes
            self.fetched += 1
            self.fetched_bytes += tensor.nbytes

    def use(self, key: Key) -> torch.Tensor:
        """Give a value away; the caller owns it."""
        entry = self._entries[key]
        entry.uses -= 1
        if entry.uses > 0:
            return entry.tensor.clone()
        del self._entries[key]
        self.size_bytes -= entry.tensor.nbytes
        return entry.tensor

    def drop(self) -> None:
        """Drop everything: it may no longer be true."""
        self.unused += len(self._entries)
        self.unused_bytes += self.size_bytes
        self._entries.clear()
        self.size_bytes = 0
