"""Contents: what was uploaded is known by what it holds, so that the same bytes need not travel twice.

A server keeps the uploads of an *owner*: whoever presents the same secret. It makes the digests itself, from the bytes
that came, so nobody can enter anything under a digest of his choice; and a digest opens nothing but what the same owner
has uploaded. A *mark* is made of a few samples and costs next to nothing. It says what cannot be the same, so that
nothing is digested for the sake of a first upload.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import attrs
import msgspec
import torch

from djinn.errors import ConfigurationError, ProtocolError
from djinn.wire.fingerprint import mark_of
from djinn.wire.messages import DIGEST_BYTES, TensorHeader
from djinn.wire.tensors import buffer_of, header_of, size_bytes

MIN_KEPT_BYTES = 64 * 1024
"""Smaller uploads just travel: with what comes along, saying what they are would take as long."""
MAX_LISTED = 2**20
"""Contents told to a client at once; the latest ones."""
CHUNK_BYTES = 2**22
"""Pieces that are digested side by side."""
PUBLIC = None
"""Owner of what everybody may use; no client can claim to be it."""
_THREADS = min(4, os.cpu_count() or 1)


def is_worth_keeping(header: TensorHeader) -> bool:
    """Whether a tensor is so large that it pays to look whether it is there already."""
    return size_bytes(header) >= MIN_KEPT_BYTES


def digest_of(header: TensorHeader, tensor: torch.Tensor) -> bytes:
    """Digest the form of a dense CPU tensor and all of its bytes: SHA-256 of the SHA-256 of each piece."""
    data = buffer_of(tensor)
    pieces = [data[begin:begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES)]
    if len(pieces) > 1 and _THREADS > 1:
        with ThreadPoolExecutor(min(_THREADS, len(pieces))) as pool:
            digests = list(pool.map(_sha256, pieces))
    else:
        digests = [_sha256(piece) for piece in pieces]
    made = _sha256(b"".join((_sha256(msgspec.msgpack.encode(header)), *digests)))
    assert len(made) == DIGEST_BYTES
    return made


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def read_digests(file: Path) -> frozenset[bytes]:
    """Read digests, one in hexadecimal on each line; what follows a ``#`` is for people.

    Raises:
        ConfigurationError: The file cannot be read, or a line is none.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}.") from None
    found: set[bytes] = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text and not re.fullmatch(f"[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}", text):
            raise ConfigurationError(f"Line {number} of {file} is no digest.",
                                     hint=f"Write {2 * DIGEST_BYTES} hexadecimal digits; see docs/server.md.")
        found.update((bytes.fromhex(text),) if text else ())
    return frozenset(found)


@attrs.define(eq=False)
class _Content:
    """Something that was uploaded.

    Attributes:
        holders: How many values and pins of running sessions are made of it.
        digest: Made when somebody asks.
    """

    owner: str | None
    header: TensorHeader
    tensor: torch.Tensor
    mark: bytes
    holders: int = 1
    digest: bytes = b""

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.header)


class ContentStore:
    """The contents that a server keeps for all its owners.

    What a running session holds is kept; what no session holds any more is kept until the room is needed, the least
    recently used goes first. If there is no room without what is held, a new content is not kept.

    Args:
        limit_bytes: Room for all contents together; 0 keeps nothing.
        public: Digests of contents that every owner may use. If there are any, all that is kept is digested at once.

    Attributes:
        hits: Uploads that did not have to travel.
        misses: Uploads that did, and are large enough to be kept.

    Concurrency:
        Any thread.
    """

    def __init__(self, limit_bytes: int, public: frozenset[bytes] = frozenset()) -> None:
        self.limit_bytes = limit_bytes
        self._public = public
        self._lock = threading.Lock()
        self._owned: dict[str | None, dict[_Content, None]] = {}
        self._idle: OrderedDict[_Content, None] = OrderedDict()
        self._held_bytes = 0
        self._idle_bytes = 0
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept."""
        return self._held_bytes + self._idle_bytes

    def count(self, owner: str) -> int:
        """How many contents an owner has."""
        with self._lock:
            return len(self._owned.get(owner, ())) + len(self._owned.get(PUBLIC, ()))

    def add(self, owner: str, header: TensorHeader, tensor: torch.Tensor) -> _Content | None:
        """Keep a content, held once, if there is room for it."""
        digest = digest_of(header, tensor) if self._public else b""
        made = _Content(PUBLIC if digest in self._public else owner, header, tensor, mark_of(header, tensor),
                        digest=digest)
        with self._lock:
            self.misses += 1
            if self._held_bytes + made.size_bytes > self.limit_bytes:
                return None
            while self.size_bytes + made.size_bytes > self.limit_bytes:
                self._drop(next(iter(self._idle)))
            self._owned.setdefault(made.owner, {})[made] = None
            self._held_bytes += made.size_bytes
        return made

    def all_held(self, owner: str) -> list[_Content]:
        """List the latest contents of an owner, each held once more."""
        with self._lock:
            found = self._latest(owner)
            for content in found:
                self._hold(content)
        return found

    def marks(self, owner: str) -> list[bytes]:
        """List the marks of an owner's latest contents."""
        with self._lock:
            return [content.mark for content in self._latest(owner)]

    def hold(self, content: _Content) -> None:
        """Hold a content once more, for an upload that does not have to travel."""
        with self._lock:
            self.hits += 1
            self._hold(content)

    def release(self, contents: Iterable[_Content]) -> None:
        """Hold contents once less."""
        with self._lock:
            for content in contents:
                content.holders -= 1
                if not content.holders:
                    self._held_bytes -= content.size_bytes
                    self._idle_bytes += content.size_bytes
                    self._idle[content] = None

    def drop_idle(self, contents: Iterable[_Content]) -> None:
        """Let go of contents, unless somebody holds them."""
        with self._lock:
            for content in contents:
                if content in self._idle:
                    self._drop(content)

    def drop_spare(self) -> int:
        """Let go of all contents that no session holds, and say how many bytes that were."""
        with self._lock:
            size_bytes = self._idle_bytes
            for content in list(self._idle):
                self._drop(content)
        return size_bytes

    def _latest(self, owner: str) -> list[_Content]:
        found = [*self._owned.get(PUBLIC, {}), *self._owned.get(owner, {})]
        return list(islice(reversed(found), MAX_LISTED))

    def _hold(self, content: _Content) -> None:
        if not content.holders:
            del self._idle[content]
            self._idle_bytes -= content.size_bytes
            self._held_bytes += content.size_bytes
        content.holders += 1

    def _drop(self, content: _Content) -> None:
        del self._idle[content]
        self._idle_bytes -= content.size_bytes
        owned = self._owned[content.owner]
        del owned[content]
        if not owned:
            del self._owned[content.owner]


class Contents:
    """What one session sees of its owner's contents.

    A content whose digest the session has been told stays until the session ends, so a client can rely on it.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, store: ContentStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._values: dict[int, _Content] = {}
        self._told: dict[bytes, _Content] = {}

    def keep(self, handle: int, tensor: torch.Tensor) -> None:
        """Keep what was uploaded for a value, if it is large enough and there is room.

        Args:
            handle: The value.
            tensor: Its content, which nobody else may write to from now on.
        """
        self.release((handle,))
        header = header_of(tensor)
        made = self._store.add(self._owner, header, tensor) if is_worth_keeping(header) else None
        if made is not None:
            self._values[handle] = made

    def recall(self, handle: int, digest: bytes) -> torch.Tensor:
        """Return the content of a digest, to be copied, and hold it for a value.

        Raises:
            ProtocolError: This session was told of no such digest.
        """
        content = self._told.get(digest)
        if content is None:
            raise ProtocolError("No content of that digest is kept for this session.")
        self.release((handle,))
        self._store.hold(content)
        self._values[handle] = content
        return content.tensor

    def kept(self, handle: int) -> torch.Tensor | None:
        """Return what is kept of what was uploaded for a value, to be read."""
        content = self._values.get(handle)
        return None if content is None else content.tensor

    def marks(self) -> list[bytes]:
        """List the marks of the owner's contents."""
        return self._store.marks(self._owner)

    def digests(self) -> list[bytes]:
        """List the digests of the owner's contents; those that were not needed so far are made now."""
        found = self._store.all_held(self._owner)
        known = set(self._told)
        spare: list[_Content] = []
        for content in found:
            content.digest = content.digest or digest_of(content.header, content.tensor)
            if self._told.setdefault(content.digest, content) is not content or content.digest in known:
                spare.append(content)
        self._store.release(spare)
        self._store.drop_idle(spare)
        return list(self._told)

    def release(self, handles: Iterable[int]) -> None:
        """Let go of the contents of values that are gone."""
        gone = [content for handle in handles if (content := self._values.pop(handle, None)) is not None]
        if gone:
            self._store.release(gone)

    def close(self) -> None:
        """Let go of everything; the store keeps it for the owner's next session while there is room."""
        told, self._told = list(self._told.values()), {}
        self._store.release([*self._values.values(), *told])
        self._values.clear()
