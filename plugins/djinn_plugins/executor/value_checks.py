"""Which operations of programs check values where they run.

On CUDA, such a check is an assertion in a kernel. If it fails, the device reports that without naming the operation.
"""

from __future__ import annotations

from collections.abc import Iterable

from djinn.ir.program import Program
from djinn.ir.schema import facts_of
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("value_checks_of",)

_ARGUMENTS = frozenset(("index", "indices", "offsets"))
"""Names of arguments whose values are positions in another tensor."""
_OPERATORS = frozenset(f"aten::{name}" for name in (
    "_assert_async", "bernoulli", "bernoulli_", "binary_cross_entropy", "multi_margin_loss",
    "multilabel_margin_loss_forward", "multinomial", "nll_loss", "nll_loss2d", "nll_loss2d_backward",
    "nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward"))
"""Other operators that check values: classes, and probabilities."""


def value_checks_of(programs: Iterable[Program]) -> list[str]:
    """Return the operators of programs that check values, without their overloads, in the order of their steps."""
    operators = dict.fromkeys(
        program.templates[step.template].operator for program in programs for step in program.steps)
    return list(dict.fromkeys(name for operator in operators
                              if (name := operator.partition(".")[0]) in _OPERATORS
                              or not _ARGUMENTS.isdisjoint(facts_of(operator_named(operator)).argument_names)))
