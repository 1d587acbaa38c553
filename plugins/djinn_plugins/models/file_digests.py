"""Digests of files. They are remembered between processes, so that a file is digested again only after it has changed.

A digest is remembered with the file's path and with what the system says of it: device, inode, size, and the times of
the last write and of the last change. If one of these differs, the file is digested again. Where they could stay the
same although the file changes, nothing is remembered. A file's name says nothing of its content, not even in the cache
of Hugging Face's hub, where it once was the content's digest: a program may have written through a link to the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Annotated

import attrs
import msgspec
from msgspec import Meta

from djinn.settings.privacy import remedy_of
from djinn_plugins.common.files.cache_files import cache_folder, write_whole
from djinn_plugins.common.files.identity import CHUNK_BYTES, COARSE_NS, FileIdentity, identity_of

if TYPE_CHECKING:
    from djinn_plugins.common.files.tensor_extents import TensorExtent

__all__ = ("Digested", "digest_of", "digested", "part_digest")

MAX_FILES = 1000
"""Most files that are remembered."""
MAX_BYTES = 2**20
"""Largest file of digests that is read."""
SETTLED_NS = 60 * 10**9
"""How long a file has to be unchanged before it is remembered.

A write through a mapping changes the file's times only if the system has written the page to the disk since the last
one, which takes about half a minute.
"""


@attrs.frozen
class Digested:
    """A file's digest.

    Attributes:
        identity: What the system said of the file before it was digested.
        digest: SHA-256 of its content, in hexadecimal.
        parts: If a later change need not show in the identity: digests of parts that were read together with the whole.
    """

    identity: FileIdentity
    digest: str
    parts: Mapping[str, bytes] | None = None


class _Known(msgspec.Struct, frozen=True, array_like=True):
    path: str
    identity: FileIdentity
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


def digest_of(file: Path) -> str:
    """Return SHA-256 of a file's content, in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    return digested(file, {}).digest


def digested(file: Path, extents: Mapping[str, TensorExtent]) -> Digested:
    """Digest a file, or remember its digest.

    Args:
        file: The file.
        extents: Parts of it, by name, which are digested, too, if a change of the file might not show.

    Raises:
        OSError: The file cannot be read.
    """
    with file.open("rb", buffering=0) as opened:
        identity = identity_of(opened.fileno())
        known = _remembered().get(str(file))
        if known is not None and known.identity == identity:
            return Digested(identity, known.digest)
        is_reliable = _is_reliable(identity, time_ns())
        if extents and not is_reliable:
            return _digested_in_parts(opened, identity, extents)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if is_reliable and identity_of(opened.fileno()) == identity:
            _remember(_Known(str(file), identity, digest))
    return Digested(identity, digest, None if is_reliable else {})


def _digested_in_parts(file: FileIO, identity: FileIdentity, extents: Mapping[str, TensorExtent]) -> Digested:
    """Digest a file and parts of it. Each byte is read once, so the digests are of the same bytes."""
    whole, parts, position = hashlib.sha256(), dict[str, bytes](), 0
    for name, extent in sorted(extents.items(), key=lambda each: each[1].begin):
        part = part_digest()
        _read(file, extent.begin - position, whole)
        _read(file, extent.end - extent.begin, whole, part)
        parts[name], position = part.digest(), extent.end
    _read(file, identity.size_bytes - position, whole)
    return Digested(identity, whole.hexdigest(), parts)


def _read(file: FileIO, count: int, *digests: hashlib._Hash) -> None:
    while count > 0 and (chunk := file.read(min(count, CHUNK_BYTES))):
        count -= len(chunk)
        for digest in digests:
            digest.update(chunk)


def part_digest() -> hashlib._Hash:
    """Return what digests a part of a file."""
    return hashlib.sha256()


def _is_reliable(identity: FileIdentity, now_ns: int) -> bool:
    """Whether any later change will change the file's times."""
    latest_ns = max(identity.written_ns, identity.changed_ns)
    return bool(identity.changed_ns % COARSE_NS) and latest_ns + SETTLED_NS <= now_ns and (
        not _is_in_memory(identity.device))


def _is_in_memory(device: int) -> bool:
    """Whether a file system keeps its files in memory: writes through mappings never change their times there."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.split(" ", 3)[2] == number and mount.partition(" - ")[2].startswith(("tmpfs ", "ramfs "))
               for mount in mounts)


def _path() -> Path:
    return cache_folder() / "digests.json"


def _remembered() -> dict[str, _Known]:
    """Read the remembered digests, unless others could have written them."""
    try:
        with _path().open("rb") as file:
            if remedy_of(_path(), os.fstat(file.fileno())):
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
