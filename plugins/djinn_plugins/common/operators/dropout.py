"""Dropout probabilities of calls: where they are zero, no random numbers are drawn, though the operator is random."""

from __future__ import annotations

from functools import lru_cache

from djinn.ir.program import Argument, ListArgument, NumberArgument, Template
from djinn.ir.schema import SchemaFacts, facts_of
from djinn.ir.tape import Node
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("count_numbers", "draws", "dropout_numbers", "may_drop")


def draws(node: Node) -> bool:
    """Whether an operation draws random numbers; attention without dropout does not."""
    signature = node.signature
    if not signature.is_random:
        return False
    positions = _positions(signature.template)
    return positions is None or any(node.numbers[position] != 0 for position in positions)


def may_drop(facts: SchemaFacts) -> bool:
    """Whether an operator has a dropout probability."""
    return any(name.startswith("dropout") for name in facts.argument_names)


def dropout_numbers(template: Template, facts: SchemaFacts) -> tuple[int, ...]:
    """Return which numbers of a call are dropout probabilities."""
    found: list[int] = []
    position = 0
    for name, argument in (*zip(facts.argument_names, template.arguments, strict=False), *template.keywords):
        width = count_numbers(argument)
        found += range(position, position + width) if name.startswith("dropout") else ()
        position += width
    return tuple(found)


def count_numbers(argument: Argument) -> int:
    """Count the numbers that an argument takes."""
    if isinstance(argument, ListArgument):
        return sum(map(count_numbers, argument.items))
    return int(isinstance(argument, NumberArgument))


@lru_cache(4096)
def _positions(template: Template) -> tuple[int, ...] | None:
    """Return the positions of the probabilities; ``None`` if the operator has none."""
    facts = facts_of(operator_named(template.operator))
    return dropout_numbers(template, facts) if may_drop(facts) else None
