"""Decides whether a piece of tape is a pure function of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from djinn.ir.program import Template
from djinn.ir.schema import facts_of
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.kinds.classifier import SupportsEffects
from djinn_plugins.common.operators.dropout import dropout_numbers, may_drop
from djinn_plugins.common.operators.operators import operator_named

SMALL_BYTES = 64 * 1024
"""If all results together are not larger than this, copying them costs as little as copying nothing."""


@attrs.frozen
class _Nature:
    """Effects of one template in addition to its results.

    Attributes:
        hides: Whether it may write values that its schema does not mention, or depend on more than its arguments.
        joins: Whether its results may share their storage with its first operand although its schema does not say so.
        repeats: Whether equal arguments give equal results, if its dropout probabilities are zero.
        probabilities: Which of its numbers are dropout probabilities.
    """

    hides: bool
    joins: bool
    repeats: bool
    probabilities: tuple[int, ...] = ()


@attrs.frozen
class Share:
    """One kept result of a piece.

    Attributes:
        number: Its handle.
        storage: Number of the value that originally owned its storage.
        base: Position of the piece's input whose storage it shares; -1 if the storage was created inside the piece.
        root: Which of the storages created inside the piece it belongs to; 0 for none.
    """

    number: int
    storage: int
    base: int
    root: int


@attrs.frozen
class Function:
    """A piece of tape that is a pure function: it changes nothing outside, and its inputs determine its results.

    Attributes:
        inputs: The values it reads from outside, in the order of first use.
        kept: Its kept results, in program order.
        sizes_bytes: Bytes of each kept storage created inside.
        is_worth_it: Whether computing moves more bytes than copying the results does, or copying costs next to nothing.
    """

    inputs: tuple[Slot, ...]
    kept: tuple[Share, ...]
    sizes_bytes: Mapping[int, int]
    is_worth_it: bool


class Natures:
    """Decides which pieces of tape are functions.

    Args:
        classifier: The session's classifier; it knows which operators do more than their schemas say.
    """

    def __init__(self, classifier: SupportsEffects) -> None:
        self._classifier = classifier
        self._known: dict[int, _Nature] = {}

    def written(self, nodes: Sequence[Node]) -> set[int]:
        """Return everything that nodes may write to: values, and the storages of values.

        This includes the storage of an operand that a result will share under another number.
        """
        found: set[int] = set()
        made = {slot.number for node in nodes for slot in node.outputs}
        for node in nodes:
            nature, writes = self._nature(node), list(node.signature.writes)
            if nature.hides:
                writes = list(range(len(node.inputs)))
            elif nature.joins and node.inputs[0].storage not in made:
                writes.append(0)
            for index in writes:
                slot = node.inputs[index]
                found.add(slot.number)
                found.add(slot.storage)
        return found

    def function(self, nodes: Sequence[Node], kept: Sequence[int]) -> Function | None:
        """View a piece as a function, if it is one.

        Args:
            nodes: The piece.
            kept: The numbers of its results that are kept, in program order.
        """
        if not all(map(self._repeats, nodes)):
            return None
        inputs: dict[Slot, int] = {}
        specs: dict[Slot, TensorSpec | None] = {}
        roots: dict[Slot, Slot] = {}
        for node in nodes:
            signature, joins = node.signature, self._nature(node).joins
            for slot in node.inputs:
                if slot not in specs:
                    inputs.setdefault(slot, len(inputs))
            if not all(_is_inside(node.inputs[index], roots, specs) for index in signature.writes):
                return None
            if joins and not _is_inside(node.inputs[0], roots, specs):
                return None
            for slot, spec, alias in zip(node.outputs, signature.results, signature.aliases, strict=True):
                specs[slot] = spec
                if alias >= 0 or joins:
                    roots[slot] = _root(node.inputs[max(alias, 0)], roots)
        wanted = set(kept)
        return _function(nodes, inputs, {slot: _root(slot, roots) for slot in specs if slot.number in wanted}, specs)

    def _repeats(self, node: Node) -> bool:
        nature = self._nature(node)
        return nature.repeats and all(node.numbers[index] == 0 for index in nature.probabilities)

    def _nature(self, node: Node) -> _Nature:
        signature = node.signature
        found = self._known.get(signature.template_number)
        if found is None:
            found = self._known[signature.template_number] = self._examined(
                signature.template, signature.is_random, bool(signature.writes or signature.results))
        return found

    def _examined(self, template: Template, is_random: bool, shows: bool) -> _Nature:
        operator = operator_named(template.operator)
        facts = facts_of(operator)
        hides = not shows or self._classifier.hides_effects(operator)
        repeats = not (hides or facts.changes_metadata or (is_random and not may_drop(facts)))
        return _Nature(hides, self._classifier.shares_silently(operator), repeats,
                       dropout_numbers(template, facts))


def _root(slot: Slot, roots: Mapping[Slot, Slot]) -> Slot:
    return roots.get(slot, slot)


def _is_inside(slot: Slot, roots: Mapping[Slot, Slot], made: Mapping[Slot, Any]) -> bool:
    """Whether a write to a value stays inside the piece; not if the value's storage has been replaced meanwhile."""
    root = _root(slot, roots)
    return root in made and slot.storage in (root.number, slot.number)


def _function(
    nodes: Sequence[Node], inputs: Mapping[Slot, int], roots: Mapping[Slot, Slot], specs: Mapping[Slot, Any]
) -> Function | None:
    shares: list[Share] = []
    sizes: dict[int, int] = {}
    for slot, root in roots.items():
        base = inputs.get(root, -1)
        if specs[slot] is None or (base < 0 and specs[root] is None):
            # Not a tensor, or a tensor whose size the client does not know yet.
            return None
        shares.append(Share(slot.number, slot.storage, base, root.number if base < 0 else 0))
        if base < 0:
            sizes[root.number] = max(sizes.get(root.number, 0), specs[root].reach_bytes, specs[slot].reach_bytes)
    work = sum(_moved_bytes(node) for node in nodes)
    size = sum(sizes.values())
    return Function(tuple(inputs), tuple(shares), sizes, bool(shares) and (work > 2 * size or size <= SMALL_BYTES))


def _moved_bytes(node: Node) -> int:
    """Bytes that a node reads and writes; none for views."""
    signature = node.signature
    if signature.results and min(signature.aliases) >= 0:
        return 0
    read = sum(spec.size_bytes for spec in signature.operands)
    return read + sum(spec.size_bytes for spec in signature.results if spec is not None)
