"""Files that clients have sent, kept for their tenant: found by digest alone, and bounded.

They lie in ``.kept`` in the folder of models, in a folder for each tenant, named by their digests. Tenants have equal
parts of the limit. A file arrives in pieces. It gets its name once all of it is there and has that digest, so a name
never stands for anything else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import os
import re
import threading
from collections import defaultdict
from pathlib import Path
from time import monotonic

import attrs

from djinn_plugins.common.files.identity import FileIdentity, identity_in, identity_of, sha256_of
from djinn_plugins.common.files.tensor_files import describe
from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.common.operators.stored_models import KeepReply

__all__ = ("FOLDER", "KeptFiles")

FOLDER = ".kept"
SUFFIX = ".safetensors"
WRITER_S = 15.0
"""After this time without a piece, another writer may continue in its place."""
GONE_S = 600.0
"""After this time without a piece, a file is dropped."""
WAIT_S = 0.25
_DIGEST = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)
_Loser = tuple[float, int, Path]
"""When a file was used, its size and its path."""


@attrs.define(eq=False)
class _Arriving:
    """A file that is being received.

    Attributes:
        path: Where it lies until it has its name.
        descriptor: Its descriptor, whose lock other servers of the folder respect.
        size_bytes: How large it will be.
        writer: Names the client that sends it.
        position: How much of it is there.
        content: Digests these bytes.
        at: When the last piece came.
    """

    path: Path
    descriptor: int
    size_bytes: int
    writer: str
    position: int = 0
    content: hashlib._Hash = attrs.field(factory=hashlib.sha256)
    at: float = attrs.field(factory=monotonic)

    def close(self) -> None:
        """Drop it, unless it has got its name."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)


class KeptFiles:
    """The kept files of a folder of models.

    Args:
        folder: The folder of models.
        limit_bytes: How much is kept, for all tenants together.

    Concurrency:
        Any thread.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder / FOLDER
        self._limit_bytes = limit_bytes
        self._known: dict[Path, FileIdentity] = {}
        """Files whose content was digested."""
        self._arriving: dict[Path, _Arriving] = {}
        self._lock = threading.Lock()
        for part in self._folder.glob("*/*.part"):
            # Of a server that has died, unless another one is receiving it.
            self._drop_unlocked(part)

    def open(self, tenant: str, digest: str) -> int:
        """Open a file of a tenant.

        Raises:
            LookupError: There is none, or it has another content than its name says.
        """
        path = self._path(tenant, digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except (OSError, ValueError):
            raise LookupError(f"No file with the digest {digest[:64]} is stored.") from None
        with self._lock:
            identity = identity_of(descriptor)
            if self._known.get(path) != identity:
                if sha256_of(descriptor) != digest:
                    os.close(descriptor)
                    self._known.pop(path, None)
                    _log.warning("the kept file %s is not served: it was changed", path.name)
                    raise LookupError(f"The kept file {path.name} has another content than its name says: it was "
                                      "changed.")
                self._known[path] = identity
        with contextlib.suppress(OSError):
            path.with_suffix(".used").touch(0o600)
        return descriptor

    def receive(self, tenant: str, digest: str, writer: str, begin: int, size_bytes: int, data: bytes) -> KeepReply:
        """Receive a piece of a file; see `djinn_plugins.server.kinds.store.SupportsKeeping`."""
        if not _DIGEST.fullmatch(digest):
            return KeepReply(problem="A file is kept by its SHA-256.")
        if not 0 < size_bytes <= self._limit_bytes:
            return KeepReply(problem=f"The file has {size_bytes} bytes; --keep allows {self._limit_bytes}.")
        path = self._path(tenant, digest)
        with self._lock:
            try:
                return self._received(path, digest, writer, begin, size_bytes, data)
            except OSError as error:
                self._drop(path)
                _strangers.write(logging.WARNING, "files that cannot be kept", "a file cannot be kept: %s", error)
                return KeepReply(problem=f"The file cannot be kept: {error.strerror}.")

    def _received(self, path: Path, digest: str, writer: str, begin: int, size_bytes: int, data: bytes) -> KeepReply:
        if path.exists() and self._known.get(path) == identity_in(path.stat()):
            return KeepReply(size_bytes, is_stored=True)
        arriving = self._arriving.get(path) or self._begun(path, size_bytes, writer)
        if arriving is None:
            return KeepReply(wait_s=WAIT_S)
        if arriving.writer != writer:
            if monotonic() - arriving.at < WRITER_S:
                return KeepReply(arriving.position, wait_s=WAIT_S)
            arriving.writer = writer
        arriving.at = monotonic()
        if arriving.size_bytes != size_bytes or begin != arriving.position or begin + len(data) > size_bytes:
            return KeepReply(arriving.position)
        self._make_room(path, arriving, len(data))
        _write(arriving.descriptor, data)
        arriving.content.update(data)
        arriving.position += len(data)
        return self._finished(path, arriving, digest) if arriving.position == size_bytes else (
            KeepReply(arriving.position))

    def _begun(self, path: Path, size_bytes: int, writer: str) -> _Arriving | None:
        """Begin to receive a file; ``None`` if another server of this folder does already."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not part.exists() or not os.path.samestat(part.stat(), os.fstat(descriptor)):
                raise BlockingIOError
        except BlockingIOError:
            os.close(descriptor)
            return None
        made = _Arriving(part, descriptor, size_bytes, writer)
        try:
            os.ftruncate(descriptor, 0)
        except OSError:
            made.close()
            raise
        self._arriving[path] = made
        return made

    def _finished(self, path: Path, arriving: _Arriving, digest: str) -> KeepReply:
        try:
            if arriving.content.hexdigest() != digest:
                raise ValueError("its content has another digest")
            describe(arriving.descriptor)
        except ValueError as error:
            self._drop(path)
            return KeepReply(problem=f"The file cannot be kept: {error}.")
        os.fsync(arriving.descriptor)
        arriving.path.replace(path)
        self._known[path] = identity_of(arriving.descriptor)
        path.with_suffix(".used").touch(0o600)
        self._drop(path)
        _log.info("the file %s of %d bytes is kept", path.stem, arriving.size_bytes)
        return KeepReply(arriving.size_bytes, is_stored=True)

    def _drop(self, path: Path) -> None:
        arriving = self._arriving.pop(path, None)
        if arriving is not None:
            arriving.close()

    def _drop_unlocked(self, part: Path) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)

    def _make_room(self, path: Path, arriving: _Arriving, size_bytes: int) -> None:
        """Delete files until another piece of an arriving one fits, and pieces of writers that are gone."""
        now = monotonic()
        for other, each in list(self._arriving.items()):
            if now - each.at >= GONE_S and each is not arriving:
                self._drop(other)
        space, losers = self._losers(path, arriving.size_bytes - arriving.position)
        for size, loser in losers:
            if space >= size_bytes:
                return
            self._drop(loser)
            loser.unlink(missing_ok=True)
            loser.with_suffix(".used").unlink(missing_ok=True)
            self._known.pop(loser, None)
            space += size
            _log.info("the kept file %s of %d bytes is dropped to make room for %s", loser.stem, size, path.stem)

    def _losers(self, path: Path, rest_bytes: int) -> tuple[int, list[tuple[int, Path]]]:
        """Choose which files must be deleted for the rest of an arriving one, the first ones first.

        Every tenant that has files has an equal part of the limit, and may use what others leave. A tenant over its
        part loses its own least recently used files. One within its part takes room from those over theirs, beginning
        with the one that has most.

        Returns:
            How many bytes are free, and the files with their sizes.

        Raises:
            OSError: Files of other tenants, or of other programs, leave no room.
        """
        mine, files = path.parent, self._deletable(path.parent)
        arriving = [each for other, each in self._arriving.items() if other.parent == mine]
        held = {tenant: sum(size for _, size, _ in each) for tenant, each in files.items()}
        space = self._limit_bytes - sum(held.values()) - sum(each.position for each in arriving)
        disk = os.statvfs(self._folder)
        is_full, space = disk.f_bavail * disk.f_frsize < space, min(space, disk.f_bavail * disk.f_frsize)
        held[mine] += sum(each.size_bytes for each in arriving)
        part, found, missing_bytes = self._limit_bytes // len(held), list[tuple[int, Path]](), rest_bytes - space
        while missing_bytes > 0:
            over = [tenant for tenant, each in files.items() if each and held[tenant] > (
                part if tenant == mine else max(part, held[mine]))]
            if not over:
                raise OSError(errno.ENOSPC, "the disk has too little room" if is_full else
                              "files of other tenants, which have equal parts, leave no room for it")
            tenant = mine if mine in over else max(over, key=held.__getitem__)
            _, size, loser = files[tenant].pop()
            held[tenant] -= size
            missing_bytes -= size
            found.append((size, loser))
        return space, found

    def _deletable(self, mine: Path) -> dict[Path, list[_Loser]]:
        """List the files of each tenant that may be deleted for a file of one of them; the first ones last."""
        files = defaultdict[Path, list[_Loser]](list, {mine: []})
        for file in self._folder.glob(f"*/*{SUFFIX}"):
            # Another server of the folder may drop it meanwhile; and one that cannot be looked at stays.
            with contextlib.suppress(OSError):
                files[file.parent].append((_used_at(file), file.stat().st_size, file))
        for other, each in self._arriving.items():
            if other.parent != mine:
                # Otherwise, files that never arrive would keep the others out.
                files[other.parent].append((math.inf, each.position, other))
        for found in files.values():
            found.sort(reverse=True)
        return files

    def _path(self, tenant: str, digest: str) -> Path:
        # The digest was checked, or comes from a worker: it must not lead anywhere else.
        if not _DIGEST.fullmatch(digest):
            raise LookupError(f"No file with the digest {digest[:64]} is stored.")
        return self._folder / hashlib.sha256(tenant.encode()).hexdigest()[:32] / (digest + SUFFIX)


def _used_at(path: Path) -> float:
    try:
        return path.with_suffix(".used").stat().st_mtime
    except OSError:
        return path.stat().st_mtime


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view):]
