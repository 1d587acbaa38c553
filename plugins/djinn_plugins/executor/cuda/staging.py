"""Copies between ordinary memory and a device, through a limited buffer of page-locked memory.

A device copies from and to page-locked memory asynchronously, while the processor continues. Page-locked memory is
scarce, so each direction has one ring buffer: a part is reused when the copy from or to it has finished.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from djinn_plugins.executor.cuda.staging_sizes import PIECE_BYTES, STAGING_BYTES

__all__ = ("CopyLane", "Passing", "Ring", "Staging")

_ALIGNMENT_BYTES = 256


class Passing(Protocol):
    """A copy in progress, represented by an event behind it on its stream."""

    def query(self) -> bool:
        """Whether it has finished."""

    def synchronize(self) -> None:
        """Wait until it has finished."""


class CopyLane(Protocol):
    """Copies in the order of the calls, concurrently with the device's other work."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Passing:
        """Start copying bytes; one of the two tensors is staging memory."""


class Ring:
    """A ring buffer.

    Args:
        memory: ``u8[N]`` on the CPU.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._next = 0
        self._busy: deque[tuple[int, int, Passing]] = deque()

    @property
    def busy(self) -> int:
        """Number of parts whose copies were still in progress at the last check."""
        return len(self._busy)

    def take(self, length: int) -> torch.Tensor:
        """Return a free part; waits only for the oldest copies, and only if they are in the way."""
        while self._busy and self._busy[0][2].query():
            self._busy.popleft()
        begin = self._next
        wraps = begin + length > len(self._memory)
        if wraps:
            begin = 0
        while self._busy:
            first, last, passing = self._busy[0]
            # The oldest parts come first, so the rest of the ring is freed before the parts at its start.
            if not (first < begin + length and last > begin) and not (wraps and first >= self._next):
                break
            passing.synchronize()
            self._busy.popleft()
        self._next = begin + length
        return self._memory[begin : begin + length]

    def lend(self, part: torch.Tensor, passing: Passing) -> None:
        """Reserve the last part taken until a copy has finished."""
        begin = int(part.storage_offset()) - int(self._memory.storage_offset())
        self._busy.append((begin, begin + len(part), passing))
        self._next = -(-self._next // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def drain(self) -> None:
        """Wait for all copies."""
        while self._busy:
            self._busy.popleft()[2].synchronize()


class Staging:
    """Staging memory of one direction.

    Args:
        lane: Copies between staging memory and the device.
        allocate: Allocates page-locked memory of a length in bytes, at the first copy.
        release: Called with that memory once no copy uses it any more.
        length: Bytes of staging memory.
        piece: Bytes of a piece.

    Concurrency:
        Any thread; one tensor at a time.
    """

    def __init__(
        self, lane: CopyLane, allocate: Callable[[int], torch.Tensor], release: Callable[[torch.Tensor], None], *,
        length: int = STAGING_BYTES, piece: int = PIECE_BYTES,
    ) -> None:
        if not 0 < piece <= length // 2:
            raise ValueError(f"pieces of {piece} bytes do not fit twice into {length}")
        self._lane = lane
        self._allocate = allocate
        self._release = release
        self._length = length
        self._piece = piece
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._ring: Ring | None = None

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Passing | None:
        """Copy ``u8[N]`` of the CPU to the device.

        Returns:
            The event of the last piece; ``None`` if the tensor is empty.

        Ownership:
            The source may change as soon as this returns.
        """
        passing = None
        with self._lock:
            ring = self._opened()
            for begin in range(0, len(source), self._piece):
                piece = source[begin : begin + self._piece]
                part = ring.take(len(piece))
                part.copy_(piece)
                passing = self._lane.copy(target[begin : begin + self._piece], part)
                ring.lend(part, passing)
        return passing

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy ``u8[N]`` of the device to the CPU, and wait for it."""
        waiting: deque[tuple[torch.Tensor, torch.Tensor, Passing]] = deque()

        def land() -> None:
            place, part, passing = waiting.popleft()
            passing.synchronize()
            place.copy_(part)

        with self._lock:
            ring = self._opened()
            for begin in range(0, len(source), self._piece):
                # As many pieces as fit into the ring without overlap, for any position in it.
                if len(waiting) >= self._length // self._piece - 1:
                    land()
                part = ring.take(min(self._piece, len(source) - begin))
                passing = self._lane.copy(part, source[begin : begin + self._piece])
                ring.lend(part, passing)
                waiting.append((target[begin : begin + self._piece], part, passing))
            while waiting:
                land()

    def close(self) -> None:
        """Release the memory; it is allocated again if another copy follows."""
        with self._lock:
            memory, ring = self._memory, self._ring
            self._memory = self._ring = None
            if memory is not None and ring is not None:
                ring.drain()
                self._release(memory)

    def _opened(self) -> Ring:
        if self._ring is None:
            self._memory = self._allocate(self._length)
            self._ring = Ring(self._memory)
        return self._ring
