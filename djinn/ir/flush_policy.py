"""Decides when to submit pending operations before a value is requested."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from djinn.ir.tape import Node

MAX_PIECE = 1024
"""Most pending operations before a submission, if the pace grows; twice that if no piece ends before."""
_GROWTH = 4
_CHOICE = 4
"""From the point where a piece may end, it continues for a quarter of its length on average: the rarer ends are, the
sooner the pieces of a loop repeat.
"""


class AdaptiveFlush:
    """Length of the pieces of tape that are submitted early.

    After a wait the other side is idle, so the first piece is very short. Recording is faster than running the recorded
    operations, so each further piece may be several times as long: few messages, and no pauses.

    A piece ends at a point that its content determines, not after a fixed count. So the pieces of a loop are the same
    in each iteration, wherever the first one began, and are recognized as known programs. Source: content-defined
    chunking, as in rsync and its successors.

    A loop that never waits reaches pieces longer than an iteration. If no such point comes, a pair of operations that
    the loop records once an iteration becomes the landmark: the next pieces end there, and are whole iterations.

    Attributes:
        limit: Number of pending operations from which `is_due` must be checked.
    """

    def __init__(self, first: int, *, is_fixed: bool) -> None:
        self.set(first, is_fixed=is_fixed)

    def set(self, first: int, *, is_fixed: bool) -> None:
        """Change the pace.

        Args:
            first: Operations in the first piece; 0 disables early submission.
            is_fixed: Whether all pieces have exactly this length.
        """
        self._first = first or sys.maxsize
        self._is_fixed = is_fixed or not first
        self.limit = self._first
        self._landmark: tuple[int, int] | None = None

    def is_due(self, nodes: Sequence[Node]) -> bool:
        """Whether ``nodes``, at least `limit` of them, form a complete piece."""
        # Another thread may submit the nodes meanwhile.
        tail = tuple([node.signature.template_number for node in nodes[-2:]])
        if self._is_fixed or len(tail) < 2:
            return True
        if len(nodes) >= 2 * self.limit:
            pairs = Counter(pairwise(node.signature.template_number for node in nodes))
            self._landmark = min(pairs, key=pairs.__getitem__, default=None)
            return True
        if tail == self._landmark or (self._landmark and self.limit >= MAX_PIECE):
            return tail == self._landmark  # A longer piece ends at the landmark only.
        # Multiply by the golden ratio, as in Knuth's hash, to spread small numbers over all residues.
        return ((31 * tail[1] + tail[0]) * 0x9E3779B1 >> 16) % max(1, self.limit // _CHOICE) == 0

    def sent(self) -> None:
        """Record that a piece was submitted."""
        if not self._is_fixed:
            self.limit = min(_GROWTH * self.limit, max(MAX_PIECE, self._first))

    def waited(self) -> None:
        """Record a wait: everything is submitted, and the other side will have run it."""
        self.limit = self._first
