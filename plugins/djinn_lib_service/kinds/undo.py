"""Optional contract of compiled programs whose writes can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from djinn_lib_service.kinds.executor import RandomState, Report, SupportsEffectReport, SupportsSpeculation

__all__ = ("SupportsUndo", "Undo")


class Undo(Protocol):
    """What a run has overwritten.

    Attributes:
        storages: Addresses of the storage objects (``_cdata``) of the inputs that it may have written.
        size_bytes: Bytes that are kept.
    """

    storages: frozenset[int]
    size_bytes: int

    def restore(self) -> None:
        """Put it back. Of several runs, the last one comes first."""


@runtime_checkable
class SupportsUndo(SupportsSpeculation, SupportsEffectReport, Protocol):
    """Optional methods of a `CompiledProgram` that may run before the client requests it, although it writes."""

    def can_undo(self, numbers: Sequence[Any]) -> bool:
        """Whether a run with these numbers has no effect except its results, random draws and writes to elements."""

    def run_with_undo(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report, limit_bytes: int,
    ) -> tuple[list[Any], Undo]:
        """Run once as `SupportsStop.run_until` does, and keep what the run overwrites, up to a limit.

        A step that would exceed the limit is not executed; it is reported as failed. After an exception, what was
        overwritten has been put back.

        Laws:
            executor.undone_exactly
        """
