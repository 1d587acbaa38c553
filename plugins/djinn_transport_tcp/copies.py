"""Memory that what was sent is copied to, until the server has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

__all__ = ("Copies",)

BLOCK_BYTES = 2**16
"""Memory is set aside in multiples of this; what is smaller is left to Python."""
MAX_FREE_BYTES = 8 * 2**20
"""So much stays set aside while nothing is in it. To set it aside anew takes longer than to copy."""


class Copies:
    """Copies of what was sent, in memory that is used again and again.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._free_bytes = 0

    def copied(self, views: Sequence[memoryview], size_bytes: int) -> memoryview:
        """Return a copy of the views, one behind the other.

        Args:
            views: What to copy.
            size_bytes: How long they are together.
        """
        if size_bytes < BLOCK_BYTES:
            return memoryview(b"".join(views))
        blocks = -(-size_bytes // BLOCK_BYTES)
        if self._free[blocks]:
            memory = self._free[blocks].pop()
            self._free_bytes -= len(memory)
        else:
            memory = bytearray(blocks * BLOCK_BYTES)
        copy = memoryview(memory)
        begin = 0
        for view in views:
            copy[begin:begin + len(view)] = view
            begin += len(view)
        return copy[:size_bytes]

    def release(self, views: Sequence[memoryview]) -> None:
        """Let go of a copy that nobody reads any more; of other memory, nothing happens."""
        memory = views[0].obj
        if isinstance(memory, bytearray) and self._free_bytes + len(memory) <= MAX_FREE_BYTES:
            self._free[len(memory) // BLOCK_BYTES].append(memory)
            self._free_bytes += len(memory)
