"""How much memory is in use, its peak, and how much was allocated and freed."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ("MemoryUsage",)

_Bytes = Annotated[int, Meta(ge=0)]


class MemoryUsage(msgspec.Struct, array_like=True):
    """Figures of PyTorch's memory statistics, in bytes.

    Attributes:
        current: In use now.
        peak: Most that was in use at once.
        allocated: Sum of all allocations.
        freed: Sum of all that was freed.
    """

    current: _Bytes = 0
    peak: _Bytes = 0
    allocated: _Bytes = 0
    freed: _Bytes = 0

    def change(self, current: int) -> None:
        """Note a new amount in use."""
        if current > self.current:
            self.allocated += current - self.current
            self.peak = max(self.peak, current)
        else:
            self.freed += self.current - current
        self.current = current

    def reset_peak(self) -> None:
        """Make the current amount the peak."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Restart the sums at zero."""
        self.allocated = self.freed = 0
