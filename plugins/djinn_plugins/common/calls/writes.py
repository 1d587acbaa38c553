"""Poison values that a program should have written but did not."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch

from djinn.errors import DjinnError
from djinn.ir.program import Program, Template, count_tensors
from djinn.ir.schema import SchemaFacts, facts_of
from djinn.wire.messages import Poisoned
from djinn_plugins.common.calls.handle_table import ValueTable
from djinn_plugins.common.calls.program_check import check_program
from djinn_plugins.common.operators.operators import operator_named

__all__ = ("poison_storage", "poison_storages", "written_handles")

_NONE: frozenset[int] = frozenset()


def poison_storage(values: ValueTable, tensor: torch.Tensor, poison: Poisoned) -> None:
    """Poison all values in a storage that should have been written but was not."""
    for handle in values.sharing(tensor):
        values.put(handle, poison)


def poison_storages(values: ValueTable, handles: Sequence[int], poison: Poisoned) -> None:
    """Poison the tensors among the values of some handles, and all values that share storages with them."""
    for value in map(values.get, handles):
        if isinstance(value, torch.Tensor):
            poison_storage(values, value, poison)


def written_handles(program: Program, inputs: Sequence[int], *, metadata: bool = False) -> list[int]:
    """List the inputs of a run that its program may write, directly or through views, by its operators' schemas.

    An operator unknown to this PyTorch is assumed to write all its arguments. A malformed program, which no client
    records, writes nothing.

    Args:
        program: The program.
        inputs: Handles of the run's inputs.
        metadata: Whether to list only inputs whose size, strides or storage the program may change.
    """
    written = _written_inputs(program, metadata=metadata)
    return [handle for position, handle in enumerate(inputs) if position in written]


def _written_inputs(program: Program, *, metadata: bool) -> AbstractSet[int]:
    try:
        check_program(program)
    except DjinnError:
        return _NONE
    written: set[int] = set()
    # By step: the index of its first result, and the inputs that its results may share memory with.
    firsts: list[int] = []
    shared: list[frozenset[int]] = []
    produced = 0
    for step in program.steps:
        template = program.templates[step.template]
        operands = [shared[bisect_right(firsts, operand) - 1] if operand >= 0 else frozenset({-1 - operand})
                    for operand in step.operands]
        firsts.append(produced)
        produced += step.results
        facts = _facts(template.operator)
        if facts is None:
            shared.append(_NONE.union(*operands))
            written |= shared[-1]
            continue
        by_name = _by_name(template, facts, operands)
        if facts.changes_metadata or not metadata:
            written.update(*(by_name.get(name, _NONE) for name in facts.written))
        shared.append(_NONE.union(*(by_name.get(alias, _NONE) for alias in facts.aliases if alias is not None)))
    return written


def _facts(name: str) -> SchemaFacts | None:
    try:
        return facts_of(operator_named(name))
    except DjinnError:
        return None


def _by_name(template: Template, facts: SchemaFacts, operands: list[frozenset[int]]) -> dict[str, frozenset[int]]:
    """Map the arguments of a call to the inputs whose memory they may share."""
    found: dict[str, frozenset[int]] = {}
    taken = 0
    for name, form in (*zip(facts.argument_names, template.arguments, strict=False), *template.keywords):
        count = count_tensors(form)
        found[name] = _NONE.union(*operands[taken : taken + count])
        taken += count
    return found
