"""Digests of files. They are remembered between processes, so that a file is digested again only after it has changed.

A digest is remembered with the file's path and with what the system says of it: device, inode, size, and the times of
the last write and of the last change. A program can set the time of the last write, but not that of the last change,
which the system notes at each write, and whenever a file gets a name or another time. If one of these differs, the file
is digested again. Where the times could stay the same although the file changes, nothing is remembered.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from djinn_lib_service.cache_files import cache_folder, write_whole
from msgspec import Meta

__all__ = ("FileIdentity", "digest_of", "identified", "identity_in", "identity_of")

MAX_FILES = 1000
"""Most files that are remembered."""
MAX_BYTES = 2**20
"""Largest file of digests that is read."""
SETTLED_NS = 60 * 10**9
"""How long a file has to be unchanged before it is remembered.

The system notes the time of a write no finer than its clock ticks. A write through a mapping it notes only if it has
written the page to the disk since the last one, which takes about half a minute.
"""
COARSE_NS = 10**6
"""Of a time that is a multiple of this, the file system does not keep the fractions that it would need."""
_BLOB = re.compile(r"[0-9a-f]{64}")


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """What the system says of a file; it differs if the file was replaced or written, but for `SETTLED_NS`."""

    device: int
    inode: int
    size_bytes: int
    written_ns: int
    changed_ns: int


class _Known(msgspec.Struct, frozen=True, array_like=True):
    path: str
    identity: FileIdentity
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


def digest_of(file: Path) -> str:
    """Return SHA-256 of a file's content, in hexadecimal. In the cache of Hugging Face's hub, it is the file's name.

    Raises:
        OSError: The file cannot be read.
    """
    return identified(file)[1]


def identified(file: Path) -> tuple[FileIdentity, str]:
    """Return what the system said of a file before it was digested, and its digest as by `digest_of`.

    Raises:
        OSError: The file cannot be read.
    """
    with file.open("rb", buffering=0) as opened:
        identity = identity_of(opened.fileno())
        if _BLOB.fullmatch(file.name) and file.parent.name == "blobs":
            return identity, file.name
        known = _remembered().get(str(file))
        if known is not None and known.identity == identity:
            return identity, known.digest
        began_ns = time.time_ns()
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if _is_reliable(identity, began_ns) and identity_of(opened.fileno()) == identity:
            _remember(_Known(str(file), identity, digest))
    return identity, digest


def identity_of(descriptor: int) -> FileIdentity:
    """Return what the system says of an open file."""
    return identity_in(os.fstat(descriptor))


def identity_in(status: os.stat_result) -> FileIdentity:
    """Return the part of a file's status that changes with the file."""
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _is_reliable(identity: FileIdentity, now_ns: int) -> bool:
    """Whether any later change will change the file's times."""
    latest_ns = max(identity.written_ns, identity.changed_ns)
    return bool(identity.changed_ns % COARSE_NS) and latest_ns + SETTLED_NS <= now_ns


def _path() -> Path:
    return cache_folder() / "digests.json"


def _remembered() -> dict[str, _Known]:
    """Read what is remembered; nothing of what others could have written."""
    try:
        with _path().open("rb") as file:
            status = os.fstat(file.fileno())
            if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
                return {}
            return {known.path: known for known in _decoder.decode(file.read(MAX_BYTES))}
    except (OSError, RuntimeError, ValueError, msgspec.DecodeError):
        return {}


def _remember(new: _Known) -> None:
    known = [*(each for each in _remembered().values() if each.path != new.path), new]
    # A folder that cannot be written costs time and nothing else.
    with suppress(OSError, RuntimeError, ValueError):
        write_whole(_path(), msgspec.json.encode(known[-MAX_FILES:]))


_decoder = msgspec.json.Decoder(list[_Known])
