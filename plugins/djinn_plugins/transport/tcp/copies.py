"""Copies of sent data, kept until the server has received it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

__all__ = ("SentCopies",)

BLOCK_BYTES = 2**16
"""Memory is allocated in multiples of this; smaller copies use Python's allocator."""
MAX_FREE_BYTES = 8 * 2**20
"""Maximum free memory that is kept for reuse. Allocating new memory takes longer than copying."""


class SentCopies:
    """Copies of sent data, in reusable memory.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._free_bytes = 0

    def copied(self, views: Sequence[memoryview], size_bytes: int) -> memoryview:
        """Return a copy of the views, concatenated.

        Args:
            views: The views to copy.
            size_bytes: Their total length.
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
        """Release a copy that is no longer read; other memory is ignored."""
        memory = views[0].obj
        if isinstance(memory, bytearray) and self._free_bytes + len(memory) <= MAX_FREE_BYTES:
            self._free[len(memory) // BLOCK_BYTES].append(memory)
            self._free_bytes += len(memory)
