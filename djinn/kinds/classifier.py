"""Classifiers say how an operation is carried out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from djinn.ir.phase import ExecutionPhase


class OperationClass(enum.Enum):
    """How an operation is carried out."""

    COMPUTE = "compute"
    """Recorded; gives tensors whose metadata can be inferred."""
    REDUCTION = "reduction"
    """Recorded; the result is much smaller than what it reads, so it should run where its input is."""
    TUPLE = "tuple"
    """Recorded; gives several tensors."""
    DATA_DEPENDENT = "data_dependent"
    """Runs at once; the shape of the result comes home, the data stays."""
    TRIGGER = "trigger"
    """Runs at once; the result is a Python value and comes home."""


class Classifier(Protocol):
    """Classifies operators. Asked once per operator and session."""

    name: str
    """Name in the configuration."""

    def classify(self, operator: torch._ops.OpOverload) -> OperationClass:
        """Say how the operator is carried out.

        Laws:
            classifier.total, classifier.deterministic, classifier.triggers_by_schema,
            classifier.data_dependent_tagged, classifier.tuples_by_schema
        """

    def is_random(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it may draw from the random generator, which orders it among all that do.

        Laws:
            classifier.random_tagged
        """

    def keep_whole(self, operator: torch._ops.OpOverload) -> bool:
        """Whether a composite operator is recorded as it is; if not, it is recorded as what it consists of.

        Only an operator that never returns one of its arguments, or a view of one, may be kept whole unless its schema
        says so.

        Laws:
            classifier.whole_is_new
        """


@runtime_checkable
class TellingClassifier(Classifier, Protocol):
    """What a classifier may have beside the methods of `Classifier`: with it, servers learn what is urgent."""

    def tells_phase(self, operator: torch._ops.OpOverload) -> bool:
        """Whether the sizes of an operator's operands may tell what the work is part of. Asked once per session."""

    def phase_told(self, operator: torch._ops.OpOverload, sizes: Sequence[Sequence[int]]) -> ExecutionPhase:
        """Say which phase such an operator is part of; ``UNKNOWN`` if these sizes do not tell. Asked once per metadata.

        Args:
            operator: One of which `tells_phase` was true.
            sizes: Of its tensors, in order.
        """


@runtime_checkable
class CandidClassifier(Classifier, Protocol):
    """What a classifier may have beside the methods of `Classifier`: with them, results can be used again."""

    def hides_effects(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it may write what its schema does not say, or depend on more than its arguments and the generator."""

    def shares_silently(self, operator: torch._ops.OpOverload) -> bool:
        """Whether results may share memory with its first tensor though its schema does not say so."""
