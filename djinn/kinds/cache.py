"""Caches: whether an executor has computed a piece of tape before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

from djinn.kinds.classifier import Classifier

if TYPE_CHECKING:
    from djinn.ir.program import ProgramLayout
    from djinn.ir.tape import Node
    from djinn.ir.value import Slot

__all__ = ("CacheFactory", "SubmissionCache")


class SubmissionCache:
    """What a backend asks before it submits work, and tells about the work. This base class caches nothing.

    Attributes:
        counts: Names of the counters that `stats` gives, each 0 while nothing is cached.

    Concurrency:
        One thread at a time.

    Laws:
        cache.results_equal, cache.limit_kept, cache.values_freed, cache.counts_named
    """

    counts: Mapping[str, int] = MappingProxyType(dict.fromkeys(
        ("results_reused", "results_dropped", "results_not_fetched", "results_kept", "results_kept_bytes"), 0))

    def find(self, nodes: Sequence[Node], released: set[int]) -> tuple[Sequence[tuple[int, int, int]] | None,
                                                                       ProgramLayout | None]:
        """Look up a segment that is about to run.

        Args:
            nodes: The segment.
            released: Numbers of its results that the program no longer refers to.

        Returns:
            The copies to make instead of running it (see `djinn.wire.messages.Copy`), or ``None`` if it must run; and
            its layout, if it was computed on the way.
        """
        return None, None

    def ran(self, nodes: Sequence[Node]) -> None:
        """Note that nodes run whose slots do not say which values share a storage."""

    def uploaded(self, number: int, dense: torch.Tensor) -> None:
        """Note which bytes a value is made of."""

    def release(self, numbers: Iterable[int]) -> list[int]:
        """Return the values that can be freed now, of those that the program no longer refers to and earlier ones."""
        return list(numbers)

    def release_all(self) -> list[int]:
        """Drop everything, and return the values that can be freed now."""
        return []

    def answered(self, *, failed: bool) -> None:
        """Note that everything submitted so far has run, and whether something failed meanwhile."""

    def fetched(self, slots: Sequence[Slot]) -> list[torch.Tensor | None]:
        """Return the values that were fetched since they were last written; the caller owns them."""
        return [None] * len(slots)

    def keep_fetched(self, slot: Slot, value: object) -> None:
        """Note the value of a slot that was fetched."""

    def stats(self) -> Mapping[str, int]:
        """Return the counters."""
        return self.counts


class CacheFactory(Protocol):
    """Makes caches of results."""

    name: str

    def open(self, max_bytes: int, classifier: Classifier) -> SubmissionCache:
        """Make a cache for one executor.

        Args:
            max_bytes: Bytes that the executor may hold for its sake.
            classifier: Tells which operations give the same result for the same operands.

        Raises:
            ConfigurationError: The classifier does not tell.
        """
