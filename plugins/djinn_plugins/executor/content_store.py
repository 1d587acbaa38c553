"""Contents: the server recognizes uploads by their content, so the same bytes need not be sent twice.

A server keeps the uploads of an *owner*: all sessions that present the same secret. The server computes the digests
itself from the bytes it received, so a client cannot store data under a digest of its choice. A digest only gives
access to data that the same owner has uploaded. A *mark* is computed from a few samples of the data and costs next to
nothing. Different marks rule out equal contents, so a first upload need not be digested.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

import attrs
import torch

from djinn.errors import ConfigurationError, ProtocolError
from djinn.wire.messages import DIGEST_BYTES, TensorHeader
from djinn.wire.tensors import header_of
from djinn_plugins.common.memory.fingerprint import mark_of
from djinn_plugins.common.memory.kept_memory import KeptBytes, KeptMemory
from djinn_plugins.common.memory.shared_values import SharedValue
from djinn_plugins.common.memory.tensor_bytes import bytes_of, size_bytes
from djinn_plugins.common.memory.upload_digests import MIN_KEPT_BYTES, digest_of

MAX_LISTED = 2**20
"""Most contents that the server lists for a client in one answer; it lists the latest ones."""
PUBLIC = None
"""Owner of uploads that all clients may use; no client can claim to be it."""


def read_digests(file: Path) -> frozenset[bytes]:
    """Read digests in hexadecimal, one per line; text after a ``#`` is a comment.

    Raises:
        ConfigurationError: The file cannot be read, or a line is not a digest.
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


class SharedUploads(Protocol):
    """Memory that values of several workers share.

    Concurrency:
        Any thread.
    """

    def store(self, header: TensorHeader, tensor: torch.Tensor, mark: bytes, *, is_public: bool,
              makes: bool = True) -> KeptBytes | None:
        """Return the bytes of a dense CPU tensor: those that another worker has stored, or a new copy of them.

        Args:
            header: The tensor's form.
            tensor: The tensor.
            mark: Its mark.
            is_public: Whether the operator has made it public.
            makes: Whether to make a copy if no other worker has one.

        Returns:
            The bytes; ``None`` if this worker cannot share them.
        """


@attrs.define(eq=False)
class _Content:
    """Uploaded data that the server keeps.

    Attributes:
        holders: How many values and pins of running sessions use it.
        digest: Computed on first use.
        shared: Its bytes in memory that values on the host can share; ``None`` if there are none.
        value: What values on a device share.
    """

    owner: str | None
    header: TensorHeader
    tensor: torch.Tensor
    mark: bytes
    holders: int = 1
    digest: bytes = b""
    shared: KeptBytes | None = None
    value: SharedValue = attrs.field(factory=SharedValue)

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.header)

    def share(self, memory: KeptMemory, uploads: SharedUploads | None, *, makes: bool = True) -> None:
        """Move it to memory that values can share, if there is room: that of other workers, too, if they may."""
        try:
            shared = uploads and uploads.store(self.header, self.tensor, self.mark, is_public=self.owner is PUBLIC,
                                               makes=makes)
            shared = shared or (memory.store(self.tensor) if makes else None)
        except (OSError, ValueError):
            return
        mapped = None if shared is None else shared.mapped(self.header)
        if mapped is not None:
            self.tensor, self.shared = mapped, shared


class ContentStore:
    """The contents that a server keeps for all its owners.

    Contents that a running session holds are kept. Contents that no session holds are kept until their space is needed,
    and evicted in least-recently-used order. If the held contents leave no room, a new content is not kept, unless
    another worker has it in memory already.

    Args:
        limit_bytes: Limit for all contents together; 0 keeps nothing.
        public: Digests of contents that every owner may use. If there are any, every content is digested when it is
            stored.
        memory: Memory that values can share with contents; ``None`` if each value is a copy.
        least_bytes: Smaller uploads are not kept.
        uploads: Memory that values of several workers share with contents; ``None`` if no other worker may know them.

    Attributes:
        hits: Uploads that did not have to be sent.
        misses: Uploads that were sent and are large enough to be kept.
        released_bytes: Bytes of uploads whose own memory was released since the caller set this to 0.

    Concurrency:
        Any thread.
    """

    def __init__(self, limit_bytes: int, public: frozenset[bytes] = frozenset(), memory: KeptMemory | None = None,
                 least_bytes: int = MIN_KEPT_BYTES, uploads: SharedUploads | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._public = public
        self._memory = memory
        self._uploads = uploads
        self._least_bytes = least_bytes
        self._lock = threading.Lock()
        self._owned: dict[str | None, dict[_Content, None]] = {}
        self._marked: dict[tuple[str | None, bytes], set[_Content]] = {}
        self._idle: OrderedDict[_Content, None] = OrderedDict()
        self._held_bytes = 0
        self._idle_bytes = 0
        self.hits = 0
        self.misses = 0
        self.released_bytes = 0

    def limit(self, limit_bytes: int) -> None:
        """Change the limit; contents that a running session holds are kept."""
        with self._lock:
            self.limit_bytes = limit_bytes
            while self._idle and self.size_bytes > limit_bytes:
                self._drop(next(iter(self._idle)))

    @property
    def size_bytes(self) -> int:
        """Bytes kept."""
        return self._held_bytes + self._idle_bytes

    def count(self, owner: str) -> int:
        """How many contents an owner has."""
        with self._lock:
            return len(self._owned.get(owner, ())) + len(self._owned.get(PUBLIC, ()))

    def add(self, owner: str, header: TensorHeader, tensor: torch.Tensor) -> _Content | None:
        """Store a content with one more holder, if it is large enough and there is room for it.

        A content of the owner with the same bytes is used again.
        """
        if size_bytes(header) < self._least_bytes:
            return None
        mark = mark_of(header, tensor)
        known = self._equal(owner, mark, header, tensor)
        if known is not None:
            self.released_bytes += known.size_bytes
            return known
        digest = digest_of(header, tensor) if self._public else b""
        made = _Content(PUBLIC if digest in self._public else owner, header, tensor, mark, digest=digest)
        with self._lock:
            self.misses += 1
            has_room = self._held_bytes + made.size_bytes <= self.limit_bytes
        if self._memory is not None and not has_room:
            # What another worker has stored takes no more memory.
            made.share(self._memory, self._uploads, makes=False)
        with self._lock:
            if made.shared is None and self._held_bytes + made.size_bytes > self.limit_bytes:
                return None
            while self._idle and self.size_bytes + made.size_bytes > self.limit_bytes:
                self._drop(next(iter(self._idle)))
            self._owned.setdefault(made.owner, {})[made] = None
            self._marked.setdefault((made.owner, mark), set()).add(made)
            self._held_bytes += made.size_bytes
        if self._memory is not None:
            if has_room:
                made.share(self._memory, self._uploads)
            self.released_bytes += made.size_bytes if made.shared is not None else 0
        return made

    def _equal(self, owner: str, mark: bytes, header: TensorHeader, tensor: torch.Tensor) -> _Content | None:
        """Return a content of the owner with the same bytes, with one more holder."""
        with self._lock:
            alike = [*self._marked.get((PUBLIC, mark), ()), *self._marked.get((owner, mark), ())]
            for content in alike:
                self._hold(content)
        data = bytes_of(tensor)
        equal = next((content for content in alike
                      if content.header == header and torch.equal(bytes_of(content.tensor), data)), None)
        self.release(content for content in alike if content is not equal)
        if equal is not None:
            with self._lock:
                self.misses += 1
        return equal

    def all_held(self, owner: str) -> list[_Content]:
        """List the latest contents of an owner, with one more holder each."""
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
        """Add a holder to a content, for an upload that does not have to be sent."""
        with self._lock:
            self.hits += 1
            self._hold(content)

    def release(self, contents: Iterable[_Content]) -> None:
        """Remove one holder from each content."""
        with self._lock:
            for content in contents:
                content.holders -= 1
                if not content.holders:
                    self._held_bytes -= content.size_bytes
                    self._idle_bytes += content.size_bytes
                    self._idle[content] = None

    def drop_idle(self, contents: Iterable[_Content]) -> None:
        """Drop contents that have no holder."""
        with self._lock:
            for content in contents:
                if content in self._idle:
                    self._drop(content)

    def drop_spare(self) -> int:
        """Drop all contents that no session holds, and return how many bytes they used."""
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
        alike = self._marked[content.owner, content.mark]
        alike.discard(content)
        if not alike:
            del self._marked[content.owner, content.mark]


class Contents:
    """A session's view of its owner's contents.

    Once a session has received a content's digest, the content is kept until the session ends, so the client can rely
    on it.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, store: ContentStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._values: dict[int, _Content] = {}
        self._told: dict[bytes, _Content] = {}

    def keep(self, handle: int, tensor: torch.Tensor) -> None:
        """Keep the data uploaded for a value, if it is large enough and there is room.

        Args:
            handle: The value.
            tensor: Its data, which nothing else may write to after this call.
        """
        self.release((handle,))
        made = self._store.add(self._owner, header_of(tensor), tensor)
        if made is not None:
            self._values[handle] = made

    def recall(self, handle: int, digest: bytes) -> torch.Tensor:
        """Return the content with a digest, for reading only, and hold it for a value.

        Raises:
            ProtocolError: This session never received that digest.
        """
        content = self._told.get(digest)
        if content is None:
            raise ProtocolError("No content of that digest is kept for this session.")
        self.release((handle,))
        self._store.hold(content)
        self._values[handle] = content
        return content.tensor

    def kept(self, handle: int) -> torch.Tensor | None:
        """Return the kept upload of a value, for reading only; ``None`` if there is none."""
        content = self._values.get(handle)
        return None if content is None else content.tensor

    def shared(self, handle: int) -> torch.Tensor | None:
        """Return a new tensor in the memory of a value's kept upload. Writes to it change nothing else.

        Returns:
            The tensor; ``None`` if the value must be a copy.
        """
        content = self._values.get(handle)
        return None if content is None or content.shared is None else content.shared.mapped(content.header)

    def value(self, handle: int) -> SharedValue | None:
        """Return what values with the content of a kept upload share on a device; ``None`` if it is not kept."""
        content = self._values.get(handle)
        return None if content is None else content.value

    def marks(self) -> list[bytes]:
        """List the marks of the owner's contents."""
        return self._store.marks(self._owner)

    def digests(self) -> list[bytes]:
        """List the digests of the owner's contents, and compute the missing ones."""
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
        """Release the contents of freed values."""
        gone = [content for handle in handles if (content := self._values.pop(handle, None)) is not None]
        if gone:
            self._store.release(gone)

    def close(self) -> None:
        """Release everything; the store keeps it for the owner's next session while there is room."""
        told, self._told = list(self._told.values()), {}
        self._store.release([*self._values.values(), *told])
        self._values.clear()
