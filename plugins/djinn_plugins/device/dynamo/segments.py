"""Recorded pieces that run repeatedly with different operands."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from djinn.ir.program import ProgramLayout
from djinn.ir.schema import ReturnKind, facts_of
from djinn.ir.tape import Node, without_dead
from djinn.ir.value import Slot
from djinn.kinds import OperationClass
from djinn.session.programs import lay_out
from djinn_plugins.common.operators.operators import operator_named

if TYPE_CHECKING:
    from djinn.session.session import Session

_numbers = itertools.count(1)
_short_keys: weakref.WeakKeyDictionary[Session, dict[tuple[int, ...], tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""Short names of programs for sessions, in place of the layout's key, which is as long as the program. Layouts have no
negative keys."""
_firsts: weakref.WeakKeyDictionary[Session, weakref.WeakValueDictionary[tuple[int, ...], Segment]] = (
    weakref.WeakKeyDictionary())
"""The first segment of each program. A loop in which a length grows has one for each length, of one program."""
SHARING = 4
"""A segment that has the slots of another one takes that part of its memory, or less."""
_DEPENDENT = (OperationClass.DATA_DEPENDENT, OperationClass.TRIGGER)


@attrs.frozen(eq=False)
class Segment:
    """A prepared layout of nodes.

    Attributes:
        reads: The slots of the recording that the nodes read from outside, in the order of `run`'s handles.
        gives: The slots of the recording whose values are kept, in the order of `run`'s results.
    """

    reads: list[Slot]
    gives: list[Slot]
    _nodes: Sequence[Node]
    _released: set[int]
    _layout: ProgramLayout
    _inputs: list[Slot]
    _outputs: list[Slot]
    _shares: bool = False

    @property
    def weight(self) -> int:
        """How many operations take as much memory."""
        return 1 + len(self._nodes) // SHARING if self._shares else len(self._nodes)

    def like(self, other: Segment) -> Segment:
        """Return the same piece with the slots of another one of the same program; they are filled in for each run."""
        pairs = zip(self._nodes, other._nodes, strict=True)
        own = [Node(mine.signature, theirs.inputs, theirs.outputs, mine.numbers, mine.origin) for mine, theirs in pairs]
        return attrs.evolve(self, nodes=own, released=other._released, inputs=other._inputs, outputs=other._outputs,
                            shares=True)

    def run(self, session: Session, handles: Sequence[int]) -> list[int]:
        """Submit the piece. The caller holds the session's lock.

        Args:
            session: The session that recorded it.
            handles: One for each slot that is read.

        Returns:
            The handle of each value that is kept; the caller releases it.
        """
        for slot, handle in zip(self._inputs, handles, strict=True):
            slot.number = handle
        numbers = session.recorder.numbers
        for slot in self._outputs:
            slot.number = next(numbers)
        given = [slot.number for slot in self._outputs]
        was = self._layout
        session.backend.run(self._nodes, self._released,
                         ProgramLayout(was.key, tuple(handles), was.numbers, was.keep, tuple(given)))
        return given


def make_piece(session: Session, nodes: Sequence[Node], wanted: Iterable[Slot]) -> Segment:
    """Lay out the nodes that compute ``wanted``, and all nodes with side effects."""
    kept = set(wanted)
    released = {slot.number for node in nodes for slot in node.outputs if slot not in kept}
    nodes = without_dead(nodes, released)
    copies: dict[Slot, Slot] = {}
    produced = {slot for node in nodes for slot in node.outputs}
    reads = list(dict.fromkeys(slot for node in nodes for slot in node.inputs if slot not in produced))

    def copy(slot: Slot) -> Slot:
        # The recording's slots belong to its lazy tensors; these copies are given other numbers in each run.
        return copies.setdefault(slot, Slot(slot.number, slot.storage))

    own = [Node(node.signature, [copy(s) for s in node.inputs], [copy(s) for s in node.outputs], node.numbers,
                node.origin) for node in nodes]
    layout = lay_out(own, released)
    gives = [slot for node in nodes for slot in node.outputs if slot in kept]
    short = _short_keys.setdefault(session, {}).setdefault(layout.key, (-next(_numbers),))
    made = Segment(reads, gives, own, released, attrs.evolve(layout, key=short), [copies[slot] for slot in reads],
                   [copies[slot] for slot in gives])
    first = _firsts.setdefault(session, weakref.WeakValueDictionary()).setdefault(short, made)
    return made if first is made else made.like(first)


def can_be_repeated(session: Session, nodes: Sequence[Node]) -> bool:
    """Whether the same nodes are recorded for any data."""
    return all(map(_independence_of(session), {node.signature.template.operator for node in nodes}))


def _independence_of(session: Session) -> Callable[[str], bool]:
    def is_independent(name: str) -> bool:
        operator = operator_named(name)
        binding = session.recorder.binding(operator)
        return binding.operation_class not in _DEPENDENT and ReturnKind.PLAIN not in facts_of(operator).returns

    return is_independent
