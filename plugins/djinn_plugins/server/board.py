"""The board: shared memory in which a worker records whose program it runs, and since when.

The gateway can read it when the worker cannot answer: while a kernel runs, and after a crash.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
from typing import Self

import attrs

from djinn_plugins.server.shared_memory import shared_memory

__all__ = ("NOBODY", "Board", "Mark", "Running", "digest_of", "mark_of")

_BEGAN = struct.Struct("<Q")
_SESSION_BYTES, _DIGEST_BYTES = 16, 32
_MARK_BYTES = _SESSION_BYTES + 2 * _DIGEST_BYTES
_SIZE = _BEGAN.size + _MARK_BYTES
Mark = bytes
"""A session's name, and the digests of its resume key and of its owner."""
NOBODY: Mark = bytes(_MARK_BYTES)


@attrs.frozen
class Running:
    """A running program.

    Attributes:
        began_ns: When it began, by the monotonic clock; unique among the worker's programs.
        session: Name of its session.
        key_digest: Digest of the key that resumes the session.
        owner_digest: Digest of the session's owner; empty if it has none.
    """

    began_ns: int
    session: str
    key_digest: bytes
    owner_digest: bytes

    @property
    def age_s(self) -> float:
        """How long it has been running."""
        return (time.monotonic_ns() - self.began_ns) / 1e9


def mark_of(session: str, key_digest: bytes, owner: str) -> Mark:
    """Make a session's mark.

    Args:
        session: Its name, 32 hexadecimal digits.
        key_digest: Digest of the key that resumes it.
        owner: The owner that its client has named; empty for none.
    """
    return bytes.fromhex(session) + key_digest + digest_of(owner)


def digest_of(owner: str) -> bytes:
    """Return the digest of a client-chosen owner; zeros if there is none."""
    return hashlib.sha256(owner.encode("utf-8", "surrogateescape")).digest() if owner else bytes(_DIGEST_BYTES)


class Board:
    """One worker's board.

    Args:
        descriptor: Descriptor of the memory; may be closed afterwards.

    Concurrency:
        One thread at a time writes; any process reads. A read during a write may be torn.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._mark = NOBODY

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Create a board, and a descriptor of its memory for the writing process. The caller owns the descriptor.

        Raises:
            OSError: The memory cannot be allocated.
        """
        descriptor = shared_memory("djinn-board", _SIZE)
        try:
            return cls(descriptor), descriptor
        except OSError:
            os.close(descriptor)
            raise

    def begin(self, mark: Mark, began_ns: int = 0) -> None:
        """Record that a program of the session with this mark has started, now or by the monotonic clock."""
        if mark is not self._mark:
            self._memory[_BEGAN.size:] = self._mark = mark
        _BEGAN.pack_into(self._memory, 0, began_ns or time.monotonic_ns())

    def end(self) -> None:
        """Record that the program has ended."""
        _BEGAN.pack_into(self._memory, 0, 0)

    def read(self) -> Running | None:
        """Return the program that is running, or was when the worker died; ``None`` if there is none."""
        data = self._memory[:]
        (began_ns,) = _BEGAN.unpack_from(data)
        if not began_ns:
            return None
        session, rest = data[_BEGAN.size:_BEGAN.size + _SESSION_BYTES], data[_BEGAN.size + _SESSION_BYTES:]
        owner = rest[_DIGEST_BYTES:]
        return Running(began_ns, session.hex(), rest[:_DIGEST_BYTES], b"" if owner == bytes(_DIGEST_BYTES) else owner)
