"""What a program is called in a list for people: the operators that it calls most often."""

from __future__ import annotations

from collections import Counter

from djinn.ir.program import Program
from djinn.ir.schema import facts_of
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("name_of",)

MAX_OPERATORS = 3


def name_of(body: Program) -> str:
    """Name a program whose operators are known to exist, such as ``48 addmm, 25 native_layer_norm, 12 gelu, 103 more``.

    Operators that only make views are named if there are no others.
    """
    computing, viewing = Counter[str](), Counter[str]()
    for template, calls in Counter(step.template for step in body.steps).items():
        operator = body.templates[template].operator
        facts = facts_of(operator_named(operator))
        is_view = any(facts.aliases) and not facts.written
        (viewing if is_view else computing)[operator.partition(".")[0].removeprefix("aten::")] += calls
    named = (computing or viewing).most_common(MAX_OPERATORS)
    more = len(body.steps) - sum(calls for _, calls in named)
    words = [name if calls == 1 else f"{calls} {name}" for name, calls in named]
    return ", ".join(words + ([f"{more} more"] if more else []))
