"""The effects of a program on its inputs, derived once from its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from djinn.ir.program import Argument, ListArgument, Program, Step, Template, TensorArgument, count_tensors
from djinn.ir.schema import SchemaFacts, facts_of
from djinn_plugins.common.calls.binding import BoundCall, written_names
from djinn_plugins.common.kinds.executor import Effects
from djinn_plugins.common.operators.operators import is_as_declared, operator_named

__all__ = ("effects_of",)

_JOINS = frozenset(("cat", "concat", "concatenate"))
_SAME = frozenset(("clone", "contiguous", "_to_copy", "expand", "repeat", "reshape", "_unsafe_view"))
"""Operators that return their input's elements in another layout."""
_PIECEWISE = ("index_", "scatter", "masked_", "slice_scatter", "select_scatter")
"""Prefixes of the operators that write some elements of a tensor."""


def effects_of(program: Program, calls: Sequence[BoundCall]) -> Effects:
    """Derive the effects of a program."""
    found = _Found(program)
    produced = 0
    for step in program.steps:
        found.look_at(step, produced)
        produced += step.results
    return found.effects(all(_repeats(template) for template in program.templates) and all(
        call.is_pure for call in calls))


def _repeats(template: Template) -> bool:
    operator = operator_named(template.operator)
    return is_as_declared(operator) and torch.Tag.nondeterministic_bitwise not in operator.tags


class _Found:
    """The state of a program's values during the analysis; values are identified as operands are."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._facts: list[tuple[SchemaFacts, torch._ops.OpOverload]] = [
            (facts_of(operator), operator)
            for operator in (operator_named(template.operator) for template in program.templates)]
        self._roots: dict[int, frozenset[int]] = {-1 - index: frozenset((-1 - index,))
                                                  for index in range(program.inputs)}
        """By value: the inputs whose storage it may share."""
        self._copies: dict[int, frozenset[int]] = {}
        """By value: the values whose elements it has, in another layout."""
        self._joined: dict[int, frozenset[int]] = {}
        """By value: the inputs whose elements it has, among others."""
        self._written: set[int] = set()
        self._patched: set[int] = set()
        self._attended: set[int] = set()
        self._changes_storages = False

    def look_at(self, step: Step, produced: int) -> None:
        """Analyze a step."""
        facts, operator = self._facts[step.template]
        template = self._program.templates[step.template]
        base = facts.name.partition("::")[2].partition(".")[0]
        is_foreign = not is_as_declared(operator)
        self._changes_storages |= facts.changes_metadata or is_foreign
        names = written_names(facts)
        for operand, name in zip(step.operands, _names_of(template, facts), strict=True):
            if is_foreign or name in names:
                self._write(operand, in_part=base.startswith(_PIECEWISE))
        if torch.Tag.inplace_view in operator.tags and step.operands:
            self._share_storage(step.operands)
        shared = self._shared(step, facts, base, is_foreign=is_foreign)
        for result in range(produced, produced + step.results):
            self._roots[result] = shared
            if step.operands and (base in _SAME or any(facts.aliases)):
                self._copies[result] = self._lineage(step.operands[0])
            if base in _JOINS:
                self._joined[result] = self._inputs_among(step.operands)
        if "attention" in base:
            for operand in step.operands[1:3]:
                self._attended |= self._lineage(operand)

    def _write(self, operand: int, *, in_part: bool) -> None:
        roots = self._roots[operand]
        self._written |= roots
        if in_part or operand >= 0:
            self._patched |= roots

    def _share_storage(self, operands: Sequence[int]) -> None:
        """Record that a value may now have another one's storage, and likewise all values that may be the same."""
        roots, reached = self._union(operands), self._union(operands[:1])
        for value, before in self._roots.items():
            if value == operands[0] or not reached.isdisjoint(before):
                self._roots[value] = before | roots

    def _shared(self, step: Step, facts: SchemaFacts, base: str, *, is_foreign: bool) -> frozenset[int]:
        # A composite may return its argument, or a view, without declaring it; so may others, by their names.
        may_share = is_foreign or facts.is_composite or any(facts.aliases) or base.lstrip("_").startswith("unsafe_")
        return self._union(step.operands) if may_share else frozenset()

    def _union(self, operands: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*(self._roots[operand] for operand in operands))

    def _lineage(self, value: int) -> frozenset[int]:
        return self._copies.get(value, frozenset()) | {value}

    def _inputs_among(self, operands: Sequence[int]) -> frozenset[int]:
        return frozenset(value for operand in operands for value in self._lineage(operand) if value < 0)

    def effects(self, repeats: bool) -> Effects:  # its one argument
        """Return the result of the analysis."""
        keep = self._program.keep
        attended = frozenset(
            [value for value in self._attended if value < 0]
            + [position for position, value in enumerate(keep) if value in self._attended])
        grown = {position: -1 - min(self._joined[value], key=lambda operand: -operand)
                 for position, value in enumerate(keep) if self._joined.get(value)}
        return Effects(
            written=frozenset(-1 - root for root in self._written), changes_storages=self._changes_storages,
            repeats=repeats, grown=grown, patched=frozenset(-1 - root for root in self._patched), attended=attended)


def _names_of(template: Template, facts: SchemaFacts) -> list[str]:
    """Return the argument name of each tensor operand, in order."""
    names: list[str] = []
    positional: Iterable[tuple[str, Argument]] = zip(facts.argument_names, template.arguments, strict=False)
    for name, argument in (*positional, *template.keywords):
        if isinstance(argument, (TensorArgument, ListArgument)):
            names += [name] * count_tensors(argument)
    return names
