"""When to hand over what is pending, though nobody waits for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from djinn.ir.tape import Node

MAX_PIECE = 1024
"""Pending operations that are handed over at the latest, where the pace grows; twice that if no piece ends before."""
_GROWTH = 4
_CHOICE = 4
"""A piece goes on for a quarter of its length on average until it may end: the rarer ends are, the sooner pieces of a
loop repeat."""


class Pace:
    """How many operations a piece of tape has that is handed over early.

    After a wait the other side has nothing to do, so the first piece is very short. Recording is faster than running
    what was recorded, so each further piece may be several times as long: few messages, and no pauses.

    A piece ends where its content says so, not after a count: then the pieces of a loop are the same in each round,
    wherever in it the first began, and known as programs. Source: content-defined chunking, as in rsync and its heirs.

    Attributes:
        limit: Pending operations from which on `is_due` is to be asked.
    """

    def __init__(self, first: int, *, is_fixed: bool) -> None:
        self.set(first, is_fixed=is_fixed)

    def set(self, first: int, *, is_fixed: bool) -> None:
        """Change the pace.

        Args:
            first: Operations of the first piece; 0 never hands anything over early.
            is_fixed: Whether all pieces are that long, to the operation.
        """
        self._first = first or sys.maxsize
        self._is_fixed = is_fixed or not first
        self.limit = self._first

    def is_due(self, nodes: Sequence[Node]) -> bool:
        """Whether ``nodes``, which are at least `limit`, are a piece."""
        # Another thread may hand the nodes over meanwhile.
        tail = nodes[-2:]
        if self._is_fixed or len(tail) < 2 or len(nodes) >= 2 * self.limit:
            return True
        before, last = (node.signature.template_number for node in tail)
        # Multiplied by the golden ratio, as Knuth's hash: small numbers are spread over all residues.
        return ((31 * last + before) * 0x9E3779B1 >> 16) % max(1, self.limit // _CHOICE) == 0

    def sent(self) -> None:
        """Learn that a piece was handed over."""
        if not self._is_fixed:
            self.limit = min(_GROWTH * self.limit, max(MAX_PIECE, self._first))

    def waited(self) -> None:
        """Learn that somebody waits: all is handed over, and the other side will have run it."""
        self.limit = self._first
