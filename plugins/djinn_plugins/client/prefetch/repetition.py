"""The operations between two waits: described so that they can be repeated at another time, on other values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch

from djinn.ir.program import Template, TensorArgument
from djinn.ir.schema import facts_of
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node, Signature
from djinn.ir.value import Slot
from djinn_plugins.client.prefetch.history import History, OperandSource, Tail, form_of
from djinn_plugins.client.prefetch.selecting import is_selection, selecting
from djinn_plugins.common.operators.harmless import are_harmless, moved_bytes

__all__ = ("Continuation", "Repeated", "described", "is_same", "learned", "repeated")

MAX_BYTES = 64 * 1024
"""Size of a value that is computed in advance."""
MAX_MOVED_BYTES = 2**20
"""Bytes that the executor reads and writes for it, unless it moved many more since the wait before."""
WORK_SHARE = 8
"""Part of the bytes moved since the wait before that may be moved for it."""
_CLONE_NUMBER = -1
"""Number of the template of copies that are made here; the session's own are numbered from 0."""


@attrs.frozen(eq=False)
class _Step:
    signature: Signature
    operands: tuple[int, ...]
    """For each operand: the n-th result of the steps, or as -1 - n, the n-th value from outside."""
    numbers: Sequence[Any]


@attrs.frozen(eq=False)
class Continuation:
    """The operations from one wait to another, and which of their results was asked for.

    Attributes:
        steps: The operations.
        outside: The values that they take.
        written: Positions of those that they write: they are repeated on copies.
        wanted: Which result was asked for.
        place: Where the program asked for it.
        is_cheap: Whether the operations move few bytes.
        selecting: Positions of steps that select an element by the number which the wait before gave.
    """

    steps: tuple[_Step, ...]
    outside: tuple[OperandSource, ...]
    written: frozenset[int]
    wanted: int
    place: Any
    is_cheap: bool
    selecting: frozenset[int] = frozenset()


@attrs.frozen(eq=False)
class Repeated:
    """Operations that are repeated ahead of the program.

    Attributes:
        copies: Copies of values that the operations write.
        nodes: The operations, as the program would record them, but on the copies.
        wanted: The result that it will ask for.
        spec: Its metadata; ``None`` for a Python value.
        run: All operations that run, in order.
        selecting: Positions of operations that select by the number which the wait before gives.
    """

    copies: tuple[Node, ...]
    nodes: tuple[Node, ...]
    wanted: Slot
    spec: TensorSpec | None
    run: tuple[Node, ...]
    selecting: frozenset[int] = frozenset()

    def after(self, answer: Any) -> Repeated:
        """Return the operations that the program would record after that answer."""
        if not self.selecting:
            return self
        nodes = [Node(node.signature, node.inputs, node.outputs, (*node.numbers[:-1], answer))
                 if position in self.selecting else node for position, node in enumerate(self.nodes)]
        return attrs.evolve(self, nodes=tuple(nodes))


def described(needed: Sequence[Node], slot: Slot, tail: Tail, history: History, place: Any) -> Continuation | None:
    """Describe operations so that they can be repeated later; ``None`` if they must not be.

    Args:
        needed: The operations.
        slot: The result that was asked for.
        tail: The operations before them.
        history: What is known of these.
        place: Where the program asked for the result.
    """
    if not needed or not are_harmless(needed) or not all(
            node.signature.writes or node.signature.results for node in needed):
        return None
    made: dict[int, int] = {}
    outside: dict[int, Slot] = {}
    places: dict[int, int] = {}
    written: set[int] = set()
    inner = {result.storage for node in needed for result in node.outputs if result.storage == result.number}
    steps = []
    for node in needed:
        if len(node.inputs) != len(node.signature.operands):
            return None
        for operand in node.inputs:
            if operand.number not in made:
                outside.setdefault(operand.number, operand)
                places.setdefault(operand.number, -len(outside))
        written |= {node.inputs[index].storage for index in node.signature.writes} - inner
        operands = tuple(made.get(operand.number, places.get(operand.number, 0)) for operand in node.inputs)
        steps.append(_Step(node.signature, operands, node.numbers))
        for result in node.outputs:
            made[result.number] = len(made)
    wanted = made.get(slot.number)
    specs = [spec for node in needed for spec in node.signature.results]
    if wanted is None or ((spec := specs[wanted]) is not None and spec.size_bytes > MAX_BYTES):
        return None
    origins = history.origins_of(list(outside.values()), tail)
    copied = frozenset(index for index, operand in enumerate(outside.values()) if operand.storage in written)
    if None in origins:
        return None
    sizes = [origin.spec.size_bytes for origin in origins if origin is not None]
    moved = sum(moved_bytes(step.signature) for step in steps) + sum(2 * sizes[index] for index in copied)
    is_cheap = moved <= MAX_MOVED_BYTES
    if not is_cheap and WORK_SHARE * moved > sum(moved_bytes(node.signature) for node in history.recent(tail)):
        return None
    return Continuation(tuple(steps), tuple(origins), copied, wanted, place, is_cheap)  # type: ignore[arg-type]  # see above


def learned(found: Continuation, before: Continuation, answer: Any) -> Continuation:
    """Return a continuation whose selections depend on the answer before, as far as they did in two rounds.

    Args:
        found: The operations of this round.
        before: Those of an earlier one, at the same place.
        answer: What the wait before has given in this round.
    """
    if type(answer) is not int or found.written or len(found.steps) != len(before.steps):
        return found
    return attrs.evolve(found, selecting=frozenset(
        position for position, (step, earlier) in enumerate(zip(found.steps, before.steps, strict=True))
        if is_selection(step.signature) and step.numbers[-1] == answer
        and (position in before.selecting or earlier.numbers != step.numbers)))


def repeated(known: Continuation, tail: Tail, history: History, numbers: Iterator[int],
             asked: Slot | None = None) -> Repeated | None:
    """Make the operations of a continuation, on the values that there are now; ``None`` if some are not.

    Args:
        known: The continuation.
        tail: The operations before it.
        history: What is known of these.
        numbers: Gives numbers to values.
        asked: The tensor whose only element the wait before gives.
    """
    if known.selecting and asked is None:
        return None
    found = [history.find(origin, tail, is_exact=index in known.written) for index, origin in enumerate(known.outside)]
    operands = [slot for slot in found if slot is not None]
    storages = Counter(slot.storage for slot in operands)
    if len(operands) < len(found) or any(
            storages[operands[index].storage] > 1 or "strides" in known.outside[index].spec.layout
            for index in known.written):
        return None
    copies = []
    for index in known.written:
        number = next(numbers)
        copy = Slot(number, number)
        copies.append(Node(_clone_of(known.outside[index].spec), (operands[index],), (copy,), ()))
        operands[index] = copy
    nodes: list[Node] = []
    run = list(copies)
    results: list[Slot] = []
    specs: list[TensorSpec | None] = []
    for position, step in enumerate(known.steps):
        inputs = tuple(results[index] if index >= 0 else operands[-1 - index] for index in step.operands)
        selects = position in known.selecting
        outputs = []
        for alias in step.signature.aliases:
            number = next(numbers)
            outputs.append(Slot(number, inputs[alias].storage if alias >= 0 and not selects else number))
        results += outputs
        specs += step.signature.results
        nodes.append(node := Node(step.signature, inputs, tuple(outputs), step.numbers))
        run += selecting(node, asked, numbers) if selects and asked is not None else [node]
    return Repeated(tuple(copies), tuple(nodes), results[known.wanted], specs[known.wanted], tuple(run),
                    known.selecting)


def is_same(expected: Repeated, needed: Sequence[Node], slot: Slot) -> bool:
    """Whether the program recorded just the operations that were foreseen, on the same values."""
    if len(needed) != len(expected.nodes):
        return False
    names = {copy.outputs[0].number: copy.inputs[0].number for copy in expected.copies}
    for ours, theirs in zip(expected.nodes, needed, strict=True):
        if not _is_alike(ours.signature, theirs.signature) or repr(ours.numbers) != repr(theirs.numbers):
            return False
        if [names.get(operand.number, operand.number) for operand in ours.inputs] != [
                operand.number for operand in theirs.inputs]:
            return False
        names.update(zip((one.number for one in ours.outputs), (one.number for one in theirs.outputs), strict=True))
    return names[expected.wanted.number] == slot.number


def _is_alike(one: Signature, other: Signature) -> bool:
    """Whether two signatures are equal, but for where in their storages the values are.

    Those of operations that return Python values are made for each call. Where a view begins, its operation says.
    """
    return one is other or (one.template_number == other.template_number and one.aliases == other.aliases
                            and [*map(form_of, one.operands)] == [*map(form_of, other.operands)]
                            and [*map(form_of, one.results)] == [*map(form_of, other.results)])


@lru_cache(256)
def _clone_of(spec: TensorSpec) -> Signature:
    facts = facts_of(torch.ops.aten.clone.default)
    template = Template(facts.name, facts.digest, (TensorArgument(),))
    return Signature(template, _CLONE_NUMBER, (spec,), (-1,), (), is_random=False, operands=(spec,))
