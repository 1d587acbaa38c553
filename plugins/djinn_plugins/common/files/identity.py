"""Whether a file has changed, as far as the system says, and the digest of its content, which says it in any case."""

from __future__ import annotations

import hashlib
import os

import msgspec

__all__ = ("CHUNK_BYTES", "COARSE_NS", "TICK_NS", "FileIdentity", "identity_in", "identity_of", "is_settled",
           "sha256_of")

TICK_NS = 50 * 10**6
"""The system notes the time of a change no finer than its clock ticks."""
COARSE_TICK_NS = 3 * 10**9
"""The same for file systems that keep whole seconds."""
COARSE_NS = 10**6
"""Of a time that is a multiple of this, the file system does not keep the fractions that it would need."""
CHUNK_BYTES = 2**23


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """What the system says of a file. It differs if the file was replaced or written, but for changes within a tick.

    A program can set the time of the last write, but not that of the last change, which the system notes at each write,
    and whenever a file gets or loses a name, or gets another time. A write through a mapping it notes only if it has
    written the page to the disk since the last one, and in a file system in memory not at all.
    """

    device: int
    inode: int
    size_bytes: int
    written_ns: int
    changed_ns: int


def identity_of(descriptor: int) -> FileIdentity:
    """Return what the system says of an open file."""
    return identity_in(os.fstat(descriptor))


def identity_in(status: os.stat_result) -> FileIdentity:
    """Return the part of a file's status that changes with the file."""
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_settled(identity: FileIdentity, now_ns: int, known_for_ns: int = 0) -> bool:
    """Whether any later write will change the file's identity.

    Args:
        identity: What the system says of the file.
        now_ns: The time of day, which may have been set back since the file was changed.
        known_for_ns: For how long the system has said so, by a clock that is never set.
    """
    tick_ns = TICK_NS if identity.changed_ns % COARSE_NS else COARSE_TICK_NS
    return identity.changed_ns + tick_ns <= now_ns or tick_ns <= known_for_ns


def sha256_of(descriptor: int) -> str:
    """Return SHA-256 of an open file's content, in hexadecimal; its position stays.

    Raises:
        OSError: The file cannot be read.
    """
    content, position = hashlib.sha256(), 0
    while chunk := os.pread(descriptor, CHUNK_BYTES, position):
        content.update(chunk)
        position += len(chunk)
    return content.hexdigest()
