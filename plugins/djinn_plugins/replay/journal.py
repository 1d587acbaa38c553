"""The journal: the operations that produced every live value. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch

from djinn.errors import RecoveryBudgetError
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.messages import GENERATOR_HANDLE
from djinn_plugins.common.operators.dropout import draws
from djinn_plugins.replay.entries import (
    GENERATOR,
    Cut,
    Entry,
    Generators,
    SeedEntry,
    Snapshot,
    UploadEntry,
    is_plain_view,
)
from djinn_plugins.replay.retained import Kept, size_of

log = logging.getLogger("djinn.recovery")

MIN_COMPACTED = 2048
"""Number of entries from which a journal is compacted whenever it has doubled."""
MAX_NODES = 2_000_000
"""Most operations kept: some 600 MB."""


class Journal:
    """Keeps the operations and data that produce the live values, and drops the rest.

    A value that owns a storage stays live as long as a view of it is live. The storage's contents can then be fetched,
    and its views rebuilt from them. This costs a handle, but no memory.

    Args:
        limit_bytes: How many bytes of tensors may be kept.

    Attributes:
        entries: The entries, in order.
        settled: Number of entries executed before the last answer; their failures have been reported.
        live: Slots of the live values, by number.
        size_bytes: Bytes of the kept tensors.
        unmeasured: Operations submitted since the last call of `measured`.
        node_s: Seconds per operation between the last two such calls; 0 before.
        is_given_up: Whether the journal became too long, so that no recovery is possible.

    Concurrency:
        The caller holds the session's lock.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.entries: list[Entry] = []
        self.settled = 0
        self.live: dict[int, Slot] = {}
        self.size_bytes = 0
        self.unmeasured = 0
        self.node_s = 0.0
        self.is_given_up = False
        self._cut = Cut()
        """Ends the pieces whose duration has not been measured yet."""
        self._measured_s = 0.0
        self._storages: dict[int, int] = {}
        self._views: dict[int, int] = {}
        self._deferred: set[int] = set()
        self._merged: dict[int, int] = {}
        self._compacted_at = 0
        self._has_said_full = False

    @property
    def node_count(self) -> int:
        """How many operations a recovery would repeat."""
        return sum(isinstance(entry, Node) for entry in self.entries)

    @property
    def replay_s(self) -> float:
        """Estimated time of a recovery: the measured time, plus an estimate for operations not measured yet.

        The estimate includes operations that have become unnecessary since the journal was last compacted.
        """
        return self._measured_s + self.unmeasured * self.node_s

    @property
    def is_due(self) -> bool:
        """Whether the journal has grown so much since its last compaction that another one is cheap by comparison."""
        return len(self.entries) >= max(MIN_COMPACTED, 2 * self._compacted_at)

    def add_nodes(self, nodes: Sequence[Node], gone: Iterable[int], *, defers: bool = True) -> list[int]:
        """Record submitted operations, and values that are no longer used after them.

        Args:
            nodes: The operations, in order.
            gone: The values.
            defers: Whether the owner of a storage can be kept while it has views.

        Returns:
            The values that executors may free.
        """
        entries, live, storages, views = self.entries, self.live, self._storages, self._views
        for node in nodes:
            for slot in node.outputs:
                number, storage = slot.number, slot.storage
                live[number] = slot
                storages[number] = storage
                if number != storage:
                    views[storage] = views.get(storage, 0) + 1
            for index in node.signature.writes:
                slot = node.inputs[index]
                if slot.number in live:
                    # The tensor's own slot shows whether the tensor gets another storage, now or later.
                    live[slot.number] = slot
        if nodes:
            entries.extend(nodes)
            entries.append(self._cut)
            self.unmeasured += len(nodes)
        return [number for dead in gone for number in self._release(dead, defers)]

    def add_upload(self, number: int, tensor: torch.Tensor, device: torch.device | None, *, is_whole: bool) -> None:
        """Record the upload of a dense CPU tensor, and keep the data if there is room."""
        spec = TensorSpec(tensor.size(), tensor.stride(), 0, tensor.dtype, device or tensor.device)
        kept, why = None, ""
        if self.size_bytes + size_of(tensor) > self.limit_bytes:
            self.compact()
        if self.size_bytes + size_of(tensor) > self.limit_bytes:
            why = (f"it was not kept here: {self.size_bytes:,} bytes are, and recovery_bytes allows "
                   f"{self.limit_bytes:,}")
            if not self._has_said_full:
                self._has_said_full = True
                log.warning("an upload of %s bytes is not kept: %s bytes are, recovery_bytes allows %s. If the server "
                            "dies, what depends on it is lost", f"{size_of(tensor):,}", f"{self.size_bytes:,}",
                            f"{self.limit_bytes:,}")
        else:
            kept = Kept.of(tensor)
            self.size_bytes += kept.size_bytes
        self.entries.append(UploadEntry(number, kept, device, spec, why, is_whole))
        if number != GENERATOR_HANDLE:
            self.live[number] = Slot(number, number)
            self._storages[number] = number

    def add_seed(self, seed: int) -> None:
        """Record that the random generators are seeded."""
        self.entries.append(SeedEntry(seed))

    def cancel(self) -> None:
        """Record a cancellation: of the operations since the last answer, some have run and the others never will.

        None of them is repeated in a recovery. The client does not know which ones have run, so the values that they
        made or wrote are lost if the server dies. Views are recreated, because that computes nothing.
        """
        unsettled = self.entries[self.settled:]
        self.entries[self.settled:] = [entry for entry in unsettled
                                       if not isinstance(entry, Node) or is_plain_view(entry)]
        lost: dict[int, TensorSpec | None] = {}
        for node in unsettled:
            if isinstance(node, Node) and not is_plain_view(node):
                signature = node.signature
                for slot, spec in zip(node.outputs, signature.results or (None,) * len(node.outputs), strict=True):
                    lost[slot.storage] = spec
                for index in signature.writes:
                    lost.setdefault(node.inputs[index].storage, signature.operands[index])
                if draws(node):
                    lost[GENERATOR_HANDLE] = None
        unknown = TensorSpec(torch.Size(), (), 0, torch.uint8, torch.device("cpu"))
        self.entries += [UploadEntry(number, None, None, spec or unknown, "it was being computed when the session was "
                                     "interrupted", is_whole=False) for number, spec in lost.items()]
        self.settled = len(self.entries)

    def add_checkpoint(self, snapshots: Sequence[Snapshot], generators: Generators | None) -> None:
        """Record the current values and random states, and drop the operations that produced them."""
        for snapshot in snapshots:
            self.size_bytes += snapshot.kept.size_bytes
        if generators is not None:
            self.size_bytes += sum(size_of(state) for _, state in generators.states)
            self.entries.append(generators)
        self.entries.extend(snapshots)
        self.settled = len(self.entries)
        self.compact()

    def measured(self, took_s: float) -> None:
        """Record how long all operations submitted since the last call took together."""
        if not self.unmeasured:
            return
        self._measured_s += took_s
        self.node_s = self._cut.node_s = took_s / self.unmeasured
        self.unmeasured = 0
        self._cut = Cut()

    def costs(self) -> list[float]:
        """Return the seconds needed to repeat each entry; 0 if not measured yet."""
        costs = [0.0] * len(self.entries)
        node_s = 0.0
        for position in range(len(costs) - 1, -1, -1):
            entry = self.entries[position]
            if isinstance(entry, Node):
                costs[position] = node_s
            elif isinstance(entry, Cut):
                node_s = entry.node_s or 0.0
        return costs

    def storage_of(self, slot: Slot) -> int:
        """Return the number that represents a value's storage; storages that a value has moved between count as one."""
        return self._root(slot.storage) if self._merged else slot.storage

    def is_merged(self, storage: int) -> bool:
        """Whether a value was moved into or out of a storage."""
        return storage in self._merged

    def merge(self, one: int, other: int) -> None:
        """Treat two storages as one, also in all earlier entries."""
        one, other = self._root(one), self._root(other)
        if one != other:
            self._merged[one] = other
            self._merged.setdefault(other, other)

    def compact(self) -> None:
        """Drop entries that no live value needs."""
        self._merge_moved()
        kept = needed_entries(self.entries, self)
        survivors: list[Entry] = []
        settled = size_bytes = 0
        for position, (entry, is_kept) in enumerate(zip(self.entries, kept, strict=True)):
            if position == self.settled:
                settled = len(survivors)
            if is_kept and not (isinstance(entry, Cut) and (not survivors or isinstance(survivors[-1], Cut))):
                survivors.append(entry)
                size_bytes += kept_bytes(entry)
        self.settled = len(survivors) if self.settled >= len(self.entries) else settled
        self.entries = survivors
        self.size_bytes = size_bytes
        self._measured_s = sum(self.costs())
        if self.is_given_up or self.node_count > MAX_NODES:
            self._give_up()
        self._compacted_at = len(self.entries)

    def _give_up(self) -> None:
        if not self.is_given_up:
            log.warning("%s", RecoveryBudgetError(
                f"A recovery would have to carry out more than {MAX_NODES:,} operations, so they are not kept any "
                "longer: if a server dies from now on, the session ends.", hint="See the warning before."))
        self.is_given_up = True
        self.entries, self.settled, self.size_bytes, self._measured_s = [], 0, 0, 0.0

    def spec_of(self, number: int) -> TensorSpec | None:
        """Look up a value's metadata, for messages and plans; slow."""
        for entry in reversed(self.entries):
            if isinstance(entry, UploadEntry) and entry.number == number:
                return entry.spec
            if isinstance(entry, Node):
                for slot, spec in zip(entry.outputs, entry.signature.results, strict=False):
                    if slot.number == number:
                        return spec
        return None

    def _release(self, number: int, defers: bool) -> Iterator[int]:
        slot = self.live.get(number)
        if slot is None:
            yield number
            return
        storage = self._storages[number]
        if slot.storage != storage:
            self.merge(slot.storage, storage)
        if number == storage:
            if defers and self._views.get(storage):
                self._deferred.add(number)
                return
        else:
            self._views[storage] -= 1
            if not self._views[storage]:
                del self._views[storage]
                if storage in self._deferred:
                    self._deferred.discard(storage)
                    yield from self._release(storage, defers)
        del self.live[number], self._storages[number]
        yield number

    def _merge_moved(self) -> None:
        for number, slot in self.live.items():
            if slot.storage != self._storages[number]:
                self.merge(slot.storage, self._storages[number])

    def _root(self, storage: int) -> int:
        while (above := self._merged.get(storage, storage)) != storage:
            storage = above
        return storage


def needed_entries(entries: Sequence[Entry], journal: Journal, more: Sequence[Entry] = ()) -> list[bool]:
    """Return which entries must be repeated to reproduce every live value.

    An operation is needed if it produces a needed value, if it writes a storage that is read later, or if its only
    possible result is a failure that has not been reported yet. Operations that only read are dropped. The remaining
    operations keep their order.

    Args:
        entries: The entries of a journal.
        journal: The journal, which knows the live values.
        more: Hypothetical entries after these.
    """
    storage_of = journal.storage_of
    values = set(journal.live)
    reads = {storage_of(slot) for slot in journal.live.values()}
    reads.add(GENERATOR)
    needed = [False] * (len(entries) + len(more))
    position = len(needed)
    for entry in chain(reversed(more), reversed(entries)):
        position -= 1
        if isinstance(entry, Node):
            signature, inputs = entry.signature, entry.inputs
            if (
                (GENERATOR in reads and draws(entry))
                or any(slot.number in values for slot in entry.outputs)
                or any(storage_of(inputs[index]) in reads for index in signature.writes)
                or (not entry.outputs and not signature.writes and position >= journal.settled)
            ):
                needed[position] = True
                for slot in inputs:
                    values.add(slot.number)
                    reads.add(storage_of(slot))
                if draws(entry):
                    reads.add(GENERATOR)
        else:
            needed[position] = _is_needed(entry, values, reads, journal)
    return needed[:len(entries)]


def _is_needed(entry: UploadEntry | SeedEntry | Generators | Snapshot | Cut, values: set[int], reads: set[int],
               journal: Journal) -> bool:
    """Return whether a non-operation entry is needed, and remove the needs that it satisfies."""
    if isinstance(entry, Cut):
        return True
    if isinstance(entry, Snapshot):
        is_needed = not values.isdisjoint(entry.made)
        values -= entry.made
        if not journal.is_merged(entry.number):
            # Of several storages that count as one, the snapshot contains only one.
            reads.discard(entry.number)
        return is_needed
    if isinstance(entry, UploadEntry) and entry.number != GENERATOR_HANDLE:
        return entry.number in values
    is_needed = GENERATOR in reads
    if not isinstance(entry, UploadEntry) or entry.is_whole:
        reads.discard(GENERATOR)
    return is_needed


def kept_bytes(entry: Entry) -> int:
    """Return the bytes of the tensors kept for an entry."""
    if isinstance(entry, Generators):
        return sum(size_of(state) for _, state in entry.states)
    kept = entry.kept if isinstance(entry, (UploadEntry, Snapshot)) else None
    return 0 if kept is None else kept.size_bytes
