"""Answers to questions that were asked before: about values that have not been written since."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import attrs

from djinn.ir.tape import Node, Signature, needed_for
from djinn.ir.value import Slot
from djinn_plugins.client.known_values.operators import Rule
from djinn_plugins.common.operators.harmless import is_harmless

__all__ = ("Question", "RememberedAnswers")

MAX_ANSWERS = 256
"""Answers that are remembered; the least recently used is dropped first."""
MAX_LATEST = 24
"""The latest operations, of which a question may be made."""
MAX_RISKY = 16
"""Operations that may fail and whose outcome is unknown; with more of them, nothing is answered."""
_Key = tuple[Any, ...]


@attrs.frozen
class Question:
    """A Python value that a program asks for, as a function of values that no operation has written since it began.

    Attributes:
        key: The operations, and the values that they take.
        nodes: The operations.
        operands: The values.
    """

    key: _Key
    nodes: tuple[Node, ...]
    operands: tuple[Slot, ...]


class RememberedAnswers:
    """Remembers numbers and truth values that a program has asked for, until an operand is written or dies.

    Nothing is answered while an operation may have failed that the program has not heard of: the failure is raised at
    the wait where it would be raised without this.

    Args:
        rule: Says what the operations with a signature do.
        is_on: Whether that includes effects that no schema declares; otherwise, nothing is remembered.

    Attributes:
        given: How many answers were given.

    Concurrency:
        One thread at a time.

    Laws:
        session.known_exact
    """

    def __init__(self, rule: Callable[[Signature], Rule], *, is_on: bool) -> None:
        self._rule = rule
        self._answers: OrderedDict[_Key, tuple[Any, frozenset[int]]] = OrderedDict()
        self._readers: dict[int, set[_Key]] = {}
        """Answers by the values and storages that they depend on."""
        self._latest: deque[Node] = deque(maxlen=MAX_LATEST)
        self._risky: list[Node] = []
        """Operations that may have failed, among those since the last answer of the executor."""
        self._is_on = is_on
        self.given = 0

    def __len__(self) -> int:
        return len(self._answers)

    def recorded(self, nodes: Sequence[Node]) -> None:
        """Note operations that the program has recorded."""
        self._latest.extend(nodes[-MAX_LATEST:])
        if self._answers:
            for node in nodes:
                if len(self._risky) > MAX_RISKY:
                    return
                if not is_harmless(node.signature):
                    self._risky.append(node)

    def written(self, slot: Slot) -> None:
        """Drop the answers that depend on a value or its storage."""
        self._drop(slot.number)
        self._drop(slot.storage)

    def died(self, numbers: Iterable[int]) -> None:
        """Drop answers about values that are freed: no question about them can follow."""
        if self._readers:
            for number in numbers:
                self._drop(number)

    def ran(self, *, writes: bool, shares: bool) -> None:
        """Note a repeated segment, whose values do not show which of them share a storage.

        Args:
            writes: Whether it writes values from outside.
            shares: Whether results share storages with values from outside: later writes to them would not be seen.
        """
        if writes or shares:
            self.forget()
        self._is_on = self._is_on and not shares
        self._risky += [None] * (MAX_RISKY + 1)  # type: ignore[list-item]  # only counted

    def forget(self) -> None:
        """Drop everything: an event was not seen."""
        self._answers.clear()
        self._readers.clear()
        self._latest.clear()

    def question(self, slot: Slot) -> Question | None:
        """Describe what a program asks for; ``None`` if that is no function of values that are there."""
        latest = list(self._latest)
        if not self._is_on or not latest:
            return None
        needed = list(compress(latest, needed_for(latest, (slot,))))
        if not needed or slot not in needed[-1].outputs or needed[-1].signature.results != (None,):
            return None
        made: dict[int, int] = {}
        operands: dict[int, Slot] = {}
        places: dict[int, int] = {}
        inner: set[int] = set()
        steps = []
        for node in needed:
            signature = node.signature
            if signature.is_random or self._rule(signature).hides or any(
                    node.inputs[index].storage not in inner for index in signature.writes):
                return None
            for operand in node.inputs:
                if operand.number not in made:
                    operands.setdefault(operand.number, operand)
                    places.setdefault(operand.number, -len(operands))
            steps.append((signature.template_number, signature.operands, signature.results, repr(node.numbers),
                          tuple(made.get(operand.number, places.get(operand.number, 0)) for operand in node.inputs)))
            for result in node.outputs:
                made[result.number] = len(made)
                if result.storage == result.number:
                    inner.add(result.storage)
        if self._may_be_written(latest, {operand.storage for operand in operands.values()}):
            return None
        return Question((tuple(operands), *steps), tuple(needed), tuple(operands.values()))

    def answer(self, question: Question) -> list[Any]:
        """Return the answer to a question, or nothing."""
        found = self._answers.get(question.key)
        # The operations of the question itself have succeeded on these values before.
        if found is None or len(self._risky) > MAX_RISKY or any(
                all(node is not known for known in question.nodes) for node in self._risky):
            return []
        self._risky.clear()
        self._answers.move_to_end(question.key)
        self.given += 1
        return [found[0]]

    def heard(self, pending: Sequence[Node]) -> None:
        """Note that everything recorded so far has run, but for some nodes, and that its failures were raised."""
        self._latest.clear()
        self._risky = [node for node in pending if not is_harmless(node.signature)]

    def remember(self, question: Question, value: Any) -> None:
        """Keep an answer."""
        numbers = frozenset(number for operand in question.operands for number in (operand.number, operand.storage))
        self._answers[question.key] = value, numbers
        for number in numbers:
            self._readers.setdefault(number, set()).add(question.key)
        if len(self._answers) > MAX_ANSWERS:
            self._remove(next(iter(self._answers)))

    def _may_be_written(self, nodes: Sequence[Node], storages: set[int]) -> bool:
        for node in nodes:
            writes = node.signature.writes
            places = range(len(node.inputs)) if self._rule(node.signature).hides else writes
            if any(node.inputs[index].storage in storages for index in places):
                return True
        return False

    def _drop(self, number: int) -> None:
        for key in tuple(self._readers.get(number, ())):
            self._remove(key)

    def _remove(self, key: _Key) -> None:
        _, numbers = self._answers.pop(key)
        for number in numbers:
            others = self._readers[number]
            others.discard(key)
            if not others:
                del self._readers[number]
