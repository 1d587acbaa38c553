"""Undoing what a run writes to its inputs, so that the run need not wait until the client requests it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from djinn.errors import LimitError
from djinn.ir.program import Program
from djinn.ir.schema import SchemaFacts, facts_of
from djinn_plugins.common.calls.binding import BoundCall, written_names
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("Overwritten", "WriteJournal", "noting")

_BY_INDEX = frozenset(("aten::index_copy_", "aten::index_add_", "aten::index_fill_.int_Scalar",
                       "aten::index_fill_.int_Tensor"))
"""Operators that write the rows of their first argument that the third one names, along the dimension of the second."""

_OVERLAPS = 1
"""`at::MemOverlap::Yes`: PyTorch then refuses to write, so putting back would fail as the operation itself does."""


class Overwritten:
    """What one run has overwritten; see `djinn_plugins.common.kinds.executor.Undo`.

    Args:
        storages: The storages whose elements are kept, by address.
        limit_bytes: Most bytes to keep.
        lock: Held while elements are put back.
    """

    def __init__(self, storages: frozenset[int], limit_bytes: int, lock: threading.RLock) -> None:
        self.storages = storages
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._lock = lock
        self._back: list[Callable[[], Any]] = []

    def keep(self, written: torch.Tensor, dimension: int | None, index: torch.Tensor | None) -> None:
        """Keep a tensor's elements, or the rows that an index names, if it lies in one of the storages.

        Raises:
            LimitError: They are too many, or cannot be put back.
        """
        if written.layout is not torch.strided:
            raise LimitError("The elements of a sparse tensor are not kept.")
        if written.untyped_storage()._cdata not in self.storages:
            return
        if torch._debug_has_internal_overlap(written) == _OVERLAPS:
            raise LimitError("The elements of a tensor that overlaps itself cannot be put back.")
        if written.itemsize == 1:
            # Some of these dtypes have no kernels.
            written = written.view(torch.uint8)
        if dimension is None or index is None:
            self._add(written.nbytes)
            before = written.clone()
            self._back.append(lambda: written.copy_(before))
            return
        rows = max(1, written.size(dimension)) if written.dim() else 1
        self._add(written.nbytes // rows * index.numel() + index.nbytes)
        # The index may be written, too, before the rows are put back.
        index = index.clone()
        before = written.index_select(dimension, index)
        self._back.append(lambda: written.index_copy_(dimension, index, before))

    def _add(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if self.size_bytes > self._limit_bytes:
            raise LimitError(f"A run would overwrite more than {self._limit_bytes} bytes.")

    def restore(self) -> None:
        """Put everything back, last writes first."""
        with self._lock, torch.inference_mode():
            while self._back:
                self._back.pop()()


@attrs.define
class WriteJournal:
    """Keeps what the calls of a program overwrite.

    Attributes:
        kept: Takes it in the run that is under way.
    """

    kept: Overwritten | None = None

    def note(self, facts: SchemaFacts, names: Iterable[str], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Keep what a call is about to overwrite."""
        assert self.kept is not None
        given = dict(zip(facts.argument_names, args, strict=False), **kwargs)
        by_index = facts.name in _BY_INDEX
        for name in names:
            value = given.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self.kept.keep(tensor, given["dim"] if by_index else None, given["index"] if by_index else None)


def noting(program: Program, calls: Sequence[BoundCall], journal: WriteJournal) -> list[BoundCall]:
    """Return the calls of a program, with those that write noting it in a journal first."""
    return [_noting(facts_of(operator_named(template.operator)), call, journal)
            for template, call in zip(program.templates, calls, strict=True)]


def _noting(facts: SchemaFacts, call: BoundCall, journal: WriteJournal) -> BoundCall:
    names = written_names(facts)
    if not names:
        return call

    def function(*args: Any, **kwargs: Any) -> Any:
        journal.note(facts, names, args, kwargs)
        return call.function(*args, **kwargs)

    return attrs.evolve(call, function=function)
