"""Classifiers decide how an operation is executed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from djinn.ir.phase import ExecutionPhase


class OperationClass(enum.Enum):
    """How an operation is executed."""

    COMPUTE = "compute"
    """Recorded; returns tensors whose metadata can be inferred."""
    REDUCTION = "reduction"
    """Recorded; the result is much smaller than the input, so it should run where its input is."""
    TUPLE = "tuple_returning"
    """Recorded; returns several tensors."""
    DATA_DEPENDENT = "shape_dependent"
    """Runs at once; the client fetches the shape of the result, and the data stays remote."""
    TRIGGER = "materialization"
    """Runs at once; the result is a Python value, which the client fetches."""
    # Names of earlier documents.
    COMPUTE_OPERATION, REDUCTION_OPERATION, TUPLE_RETURNING = COMPUTE, REDUCTION, TUPLE
    SHAPE_DEPENDENT, MATERIALIZATION_TRIGGER = DATA_DEPENDENT, TRIGGER


class Classifier(Protocol):
    """Classifies operators. Called once per operator and session."""

    name: str
    """Name in the configuration."""

    def classify(self, operator: torch._ops.OpOverload) -> OperationClass:
        """Return how the operator is executed.

        Laws:
            classifier.total, classifier.deterministic, classifier.triggers_by_schema, classifier.data_dependent_tagged,
            classifier.tuples_by_schema
        """

    def is_random(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it may draw from the random generator, so that it must keep its order among such operators.

        Laws:
            classifier.random_tagged
        """

    def keep_whole(self, operator: torch._ops.OpOverload) -> bool:
        """Whether a composite operator is recorded as a whole; otherwise, its parts are recorded.

        Only an operator that never returns one of its arguments, or a view of one, may be kept whole unless its schema
        says so.

        Laws:
            classifier.whole_is_new
        """


@runtime_checkable
class SupportsPhase(Classifier, Protocol):
    """Optional methods of a `Classifier` that let servers learn which work is urgent."""

    def reveals_phase(self, operator: torch._ops.OpOverload) -> bool:
        """Whether the sizes of an operator's operands may reveal the execution phase. Called once per session."""

    def phase_of(self, operator: torch._ops.OpOverload, sizes: Sequence[Sequence[int]]) -> ExecutionPhase:
        """Return the execution phase of such an operator; ``UNKNOWN`` if not revealed. Called once per metadata.

        Args:
            operator: An operator for which `reveals_phase` returned true.
            sizes: Sizes of its tensors, in order.
        """


@runtime_checkable
class SupportsEffects(Classifier, Protocol):
    """Optional methods of a `Classifier` that allow results to be reused."""

    def hides_effects(self, operator: torch._ops.OpOverload) -> bool:
        """Whether it may write values not in its schema, or depend on more than its arguments and the generator."""

    def shares_silently(self, operator: torch._ops.OpOverload) -> bool:
        """Whether results may share memory with its first tensor although its schema does not say so."""
