"""A cache of results: the same piece of tape on the same values is computed only once.

A piece is identified by its structure, its numbers and the *names* of the values that it reads. A value's name is its
number. A copy, and a small upload of the same bytes, has the same name as its original until either is written. Entries
keyed by names therefore stay valid: a write removes all entries that involve the storage, on both sides of a copy.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import msgspec
import torch

from djinn.ir.program import ProgramLayout
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.kinds.cache import SubmissionCache
from djinn.kinds.classifier import Classifier, SupportsEffects
from djinn.session.programs import lay_out
from djinn.wire.messages import GENERATOR_HANDLE
from djinn.wire.tensors import header_of
from djinn_plugins.client.result_cache.effects import Function, Natures, Share
from djinn_plugins.common.memory.tensor_bytes import buffer_of

log = logging.getLogger("djinn.session")

MAX_PIECES = 4096
"""Most pieces remembered; the latest are kept."""
MAX_HOME_BYTES = 2**20
"""Larger values are not cached here after they have been fetched."""
MAX_HOMES_BYTES = 16 * 2**20
"""Limit for all fetched values cached here; at most the executor's limit."""

MAX_UPLOAD_BYTES = 64 * 1024
"""Uploads up to this size are identified by their bytes."""
MAX_UPLOADS = 4096
"""Most uploads identified by their bytes; the latest are kept."""
_CONTENT = 0
"""Marks the bytes of an upload among the values of a name; values are numbered from 1."""

_encode = msgspec.msgpack.Encoder().encode
_Key = tuple[tuple[int, ...], tuple[int, ...], bytes]


@attrs.frozen
class _Name:
    """The identity of a value: the first value that was equal to it."""

    number: int
    storage: int


@attrs.define(eq=False)
class _Known:
    """An entry that is valid until one of some values or storages is written."""

    holds_on: frozenset[int]


@attrs.define(eq=False)
class _Copied(_Known):
    """A value that has the name of another."""

    number: int
    name: _Name


@attrs.define(eq=False)
class _Content(_Known):
    """Uploaded bytes, by digest; the next upload of the same bytes gets the same name."""

    digest: bytes
    name: _Name


@attrs.define(eq=False)
class _Home(_Known):
    """A value that has been fetched."""

    number: int
    tensor: torch.Tensor


@attrs.define(eq=False)
class _Piece(_Known):
    """A piece that was computed.

    Attributes:
        key: Its identity.
        reads: Names of the values that it reads.
        outputs: Its kept results, in program order, by number.
        viewed: Values whose storages its results share; without these values, the results would keep the storages
            alive.
        sizes_bytes: Bytes of the other storages.
        is_confirmed: Whether it is known that nothing failed.
        held: Results that are kept only for the cache.
        held_bytes: Bytes of these results.
    """

    key: _Key
    reads: frozenset[int]
    outputs: dict[int, Share]
    viewed: frozenset[int]
    sizes_bytes: dict[int, int]
    is_confirmed: bool = False
    held: set[int] = attrs.field(factory=set)
    held_bytes: int = 0

    def hold(self, number: int) -> None:
        """Keep a result that is otherwise unreferenced."""
        self.held.add(number)
        self.held_bytes = sum(self.sizes_bytes.get(root, 0) for root in {self.outputs[one].root for one in self.held})


class ResultCache(SubmissionCache):
    """Knows results that an executor holds, and values that were fetched; see `SubmissionCache`.

    Args:
        max_bytes: Limit for results that the executor holds only for the cache.
        classifier: See `djinn_plugins.client.result_cache.effects.Natures`.

    Concurrency:
        One thread at a time.
    """

    def __init__(self, max_bytes: int, classifier: SupportsEffects) -> None:
        self._max_bytes = max_bytes
        self._natures = Natures(classifier)
        self._pieces: OrderedDict[_Key, _Piece] = OrderedDict()
        self._unconfirmed: dict[_Piece, None] = {}
        self._given: dict[int, _Piece] = {}
        self._copied: dict[int, _Copied] = {}
        self._contents: OrderedDict[bytes, _Content] = OrderedDict()
        self._bearers: dict[int, set[int]] = {}
        """By name: the other values with that name. The value that gave the name may have been freed."""
        self._gone: set[int] = set()
        """Names whose own values have been freed while other values still have them."""
        self._homes: OrderedDict[int, _Home] = OrderedDict()
        self._homes_bytes = 0
        self._index: dict[int, set[_Known]] = {}
        self._readers: dict[int, set[_Piece]] = {}
        self._viewers: dict[int, set[_Piece]] = {}
        self._unwanted: list[int] = []
        self._kept = self._kept_bytes = 0
        self._reused = self._dropped = self._not_fetched = 0

    def find(
        self, nodes: Sequence[Node], released: set[int],
    ) -> tuple[Sequence[tuple[int, int, int]] | None, ProgramLayout]:
        """Look up a segment that is about to run."""
        layout = lay_out(nodes, released)
        return self._find(nodes, layout), layout

    def _find(self, nodes: Sequence[Node], layout: ProgramLayout) -> tuple[tuple[int, int, int], ...] | None:
        """Find a piece that is about to run among those that were run, or remember it.

        Returns:
            The copies that replace the run, see `djinn.wire.messages.Copy`; ``None`` if the piece must run.
        """
        self.written(nodes)
        function = self._natures.function(nodes, layout.outputs)
        if function is None or not function.is_worth_it:
            return None
        names = [self._name_of(slot) for slot in function.inputs]
        key = layout.key, tuple(name.number for name in names), _encode(layout.numbers)
        known = self._pieces.get(key)
        if known is None:
            self._remember(key, names, function)
        elif known.is_confirmed:
            return self._reuse(known, function)
        return None

    def written(self, nodes: Sequence[Node]) -> None:
        """Invalidate the values that nodes, about to run, will write."""
        for number in self._natures.written(nodes):
            for known in list(self._index.get(number, ())):
                self._forget(known)

    def uploaded(self, number: int, dense: torch.Tensor) -> None:
        """Record the bytes that a value was uploaded from."""
        if number == GENERATOR_HANDLE or dense.nbytes > MAX_UPLOAD_BYTES:
            return
        digest = hashlib.blake2b(_encode(header_of(dense)) + bytes(buffer_of(dense)), digest_size=32).digest()
        content = self._contents.get(digest)
        if content is not None:
            self._contents.move_to_end(digest)
            self._call(number, number, content.name)
            return
        content = self._contents[digest] = _Content(frozenset((number,)), digest, _Name(number, number))
        self._bearers.setdefault(number, set()).add(_CONTENT)
        self._watch(content)
        if len(self._contents) > MAX_UPLOADS:
            self._forget(next(iter(self._contents.values())))

    def release_all(self) -> list[int]:
        """Drop everything, and return the values that can be freed now."""
        self._forget_all()
        return self.release(())

    def _forget_all(self) -> None:
        """Anything may have been written."""
        for known in (self._pieces, self._copied, self._contents, self._homes):
            for one in list(known.values()):
                self._forget(one)

    def ran(self, nodes: Sequence[Node]) -> None:
        """Record nodes about to run whose slots do not show which values share a storage."""
        if self._natures.written(nodes):
            self._forget_all()

    def release(self, numbers: Iterable[int]) -> list[int]:
        """Record that values are no longer referenced outside the cache.

        Returns:
            Values that can be freed once everything submitted so far has run.
        """
        freed: list[int] = []
        for number in numbers:
            piece = self._given.get(number)
            if piece is None:
                freed.append(number)
            else:
                self._kept_bytes -= piece.held_bytes
                piece.hold(number)
                self._kept_bytes += piece.held_bytes
                self._kept += 1
        for number in freed:
            self._freed(number)
        while self._pieces and (self._kept_bytes > self._max_bytes or len(self._pieces) > MAX_PIECES):
            self._forget(self._oldest())
        # Freeing a value may free others, in a loop arbitrarily many: they are queued here.
        while self._unwanted:
            self._kept -= 1
            freed.append(self._unwanted.pop())
            self._freed(freed[-1])
        return sorted(freed)

    def answered(self, *, failed: bool) -> None:
        """Record that everything submitted so far has run, and whether something failed meanwhile.

        A failing piece must fail again when it is repeated, so it is not kept.
        """
        pieces, self._unconfirmed = self._unconfirmed, {}
        for piece in pieces:
            piece.is_confirmed = not failed
            if failed:
                self._forget(piece)

    def fetched(self, slots: Sequence[Slot]) -> list[torch.Tensor | None]:
        """Return the values that were fetched since they were last written; the caller owns them."""
        found = [self._home(slot) for slot in slots]
        self._not_fetched += sum(tensor is not None for tensor in found)
        return found

    def keep_fetched(self, slot: Slot, value: object) -> None:
        """Keep a fetched value, if it is small."""
        if slot.number == GENERATOR_HANDLE or not isinstance(value, torch.Tensor) or value.nbytes > MAX_HOME_BYTES:
            return
        name = self._name_of(slot)
        if name.number in self._homes:
            return
        home = _Home(frozenset((name.number, name.storage)), name.number, value.clone())
        self._homes[name.number] = home
        self._homes_bytes += value.nbytes
        self._watch(home)
        while self._homes_bytes > min(MAX_HOMES_BYTES, self._max_bytes):
            self._forget(next(iter(self._homes.values())))

    def stats(self) -> dict[str, int]:
        """Count results that were reused, are kept, and were dropped."""
        counts = self._reused, self._dropped, self._not_fetched, self._kept, self._kept_bytes
        return dict(zip(self.counts, counts, strict=True))

    def _oldest(self) -> _Piece:
        """The least recently used piece; if memory is short, only among pieces that use memory."""
        lacks_room = self._kept_bytes > self._max_bytes
        return next(piece for piece in self._pieces.values() if piece.held_bytes or not lacks_room)

    def _name_of(self, slot: Slot) -> _Name:
        copied = self._copied.get(slot.number)
        return _Name(slot.number, slot.storage) if copied is None else copied.name

    def _remember(self, key: _Key, names: Sequence[_Name], function: Function) -> None:
        if sum(function.sizes_bytes.values()) > self._max_bytes:
            return
        inputs = function.inputs
        piece = _Piece(
            frozenset(number for one in names for number in (one.number, one.storage)).union(
                number for one in function.kept for number in (one.number, one.storage)),
            key,
            frozenset(name.number for name in names),
            {share.number: share for share in function.kept},
            frozenset(inputs[share.base].number for share in function.kept if share.base >= 0),
            dict(function.sizes_bytes),
        )
        self._pieces[key] = piece
        self._unconfirmed[piece] = None
        self._watch(piece)
        self._given.update(dict.fromkeys(piece.outputs, piece))
        for number in piece.reads:
            self._readers.setdefault(number, set()).add(piece)
        for number in piece.viewed:
            self._viewers.setdefault(number, set()).add(piece)

    def _reuse(self, piece: _Piece, function: Function) -> tuple[tuple[int, int, int], ...]:
        self._pieces.move_to_end(piece.key)
        self._reused += len(piece.outputs)
        copies = []
        for known, new in zip(piece.outputs.values(), function.kept, strict=True):
            base = function.inputs[new.base].number if new.base >= 0 else 0
            copies.append((known.number, new.number, base))
            self._call(new.number, new.storage, _Name(known.number, known.storage))
        return tuple(copies)

    def _call(self, number: int, storage: int, name: _Name) -> None:
        """Give a value a name."""
        copied = _Copied(frozenset((number, storage, name.number, name.storage)), number, name)
        self._copied[number] = copied
        self._bearers.setdefault(name.number, set()).add(number)
        self._watch(copied)

    def _home(self, slot: Slot) -> torch.Tensor | None:
        name = self._name_of(slot).number
        home = self._homes.get(name)
        if home is None:
            return None
        self._homes.move_to_end(name)
        return home.tensor.clone()

    def _watch(self, known: _Known) -> None:
        for number in known.holds_on:
            self._index.setdefault(number, set()).add(known)

    def _forget(self, known: _Known) -> None:
        _remove(self._index, known.holds_on, known)
        if isinstance(known, _Home):
            if self._homes.pop(known.number, None) is not None:
                self._homes_bytes -= known.tensor.nbytes
        elif isinstance(known, _Copied):
            if self._copied.pop(known.number, None) is not None:
                self._nameless(known.name.number, known.number)
        elif isinstance(known, _Content):
            if self._contents.pop(known.digest, None) is not None:
                self._nameless(known.name.number, _CONTENT)
        elif isinstance(known, _Piece) and self._pieces.pop(known.key, None) is not None:
            self._forget_piece(known)

    def _forget_piece(self, piece: _Piece) -> None:
        self._dropped += len(piece.outputs)
        self._kept_bytes -= piece.held_bytes
        self._unwanted += piece.held
        self._unconfirmed.pop(piece, None)
        _remove(self._readers, piece.reads, piece)
        _remove(self._viewers, piece.viewed, piece)
        for number in piece.outputs:
            del self._given[number]

    def _nameless(self, name: int, bearer: int) -> None:
        """Record that a value no longer has its name."""
        _remove(self._bearers, (name,), bearer)
        if name in self._gone and name not in self._bearers:
            self._gone.remove(name)
            self._unreachable(name)

    def _freed(self, number: int) -> None:
        """Record that a value has been freed."""
        for piece in list(self._viewers.get(number, ())):
            self._forget(piece)
        copied = self._copied.get(number)
        if copied is not None:
            self._forget(copied)
        elif number in self._bearers:
            self._gone.add(number)
        else:
            self._unreachable(number)

    def _unreachable(self, name: int) -> None:
        """Drop entries that can no longer be looked up, because no value has the name."""
        for piece in list(self._readers.get(name, ())):
            self._forget(piece)
        home = self._homes.get(name)
        if home is not None:
            self._forget(home)


class ResultCacheFactory:
    """Makes caches of results."""

    name = "results"

    def open(self, max_bytes: int, classifier: Classifier) -> SubmissionCache:
        """Make a cache; one that caches nothing if the classifier does not tell which operators are pure."""
        if not isinstance(classifier, SupportsEffects):
            log.warning("results are not kept: the classifier %r does not tell which operators hide effects",
                        classifier.name)
            return SubmissionCache()
        return ResultCache(max_bytes, classifier)


def _remove(index: dict[int, set[Any]], numbers: Iterable[int], member: object) -> None:
    for number in numbers:
        members = index.get(number)
        if members is not None:
            members.discard(member)
            if not members:
                del index[number]
