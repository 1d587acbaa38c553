"""The journal: how every value that somebody still names came to be. No input and no output."""

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
from djinn_backend_replay.entries import GENERATOR, Cut, Entry, Generators, Seed, Snapshot, Upload, is_plain_view
from djinn_backend_replay.retained import Kept, size_of

log = logging.getLogger("djinn.recovery")

MIN_COMPACTED = 2048
"""Entries from which on a journal is compacted whenever it has doubled."""
MAX_NODES = 2_000_000
"""Operations that are kept at most: some 600 MB."""


class Journal:
    """Keeps what makes the values that somebody names, and forgets the rest.

    A value that owns a storage counts as named while a view of it is: so the contents of a storage can be asked for,
    and its views be made of them again. That costs a handle, no memory.

    Args:
        limit_bytes: How many bytes of tensors may be kept.

    Attributes:
        entries: What is known, in order.
        settled: So many entries were carried out before the last answer: their failures have been reported.
        live: Slots of the values that somebody names, by number.
        size_bytes: Bytes of the tensors that are kept.
        unmeasured: Operations handed over since `measured` was called last.
        node_s: Seconds that an operation took between the last two such calls; 0 before.
        is_given_up: Whether it had become too long, so that nothing can be made again.

    Concurrency:
        For the holder of the session's lock.
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
        """Ends the pieces of which it is not known how long they took."""
        self._measured_s = 0.0
        self._storages: dict[int, int] = {}
        self._views: dict[int, int] = {}
        self._deferred: set[int] = set()
        self._merged: dict[int, int] = {}
        self._compacted_at = 0
        self._has_said_full = False

    @property
    def node_count(self) -> int:
        """How many operations it would take to make everything again."""
        return sum(isinstance(entry, Node) for entry in self.entries)

    @property
    def replay_s(self) -> float:
        """How long making everything again would take: as long as it took, and as much again for what is in work.

        That includes what has become needless since the journal was compacted.
        """
        return self._measured_s + self.unmeasured * self.node_s

    @property
    def is_due(self) -> bool:
        """Whether it has grown so much since it was compacted that doing it again costs next to nothing."""
        return len(self.entries) >= max(MIN_COMPACTED, 2 * self._compacted_at)

    def add_nodes(self, nodes: Sequence[Node], gone: Iterable[int], *, defers: bool = True) -> list[int]:
        """Learn that operations are handed over, and which values nobody names behind them.

        Args:
            nodes: The operations, in order.
            gone: The values.
            defers: Whether the owner of a storage can be held while it has views.

        Returns:
            The values that executors may forget.
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
                    # The tensor's own slot tells if it is given another storage, now or later.
                    live[slot.number] = slot
        if nodes:
            entries.extend(nodes)
            entries.append(self._cut)
            self.unmeasured += len(nodes)
        return [number for dead in gone for number in self._release(dead, defers)]

    def add_upload(self, number: int, tensor: torch.Tensor, device: torch.device | None, *, is_whole: bool) -> None:
        """Learn that a dense CPU tensor is sent, and keep it if there is room."""
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
        self.entries.append(Upload(number, kept, device, spec, why, is_whole))
        if number != GENERATOR_HANDLE:
            self.live[number] = Slot(number, number)
            self._storages[number] = number

    def add_seed(self, seed: int) -> None:
        """Learn that the random numbers are seeded."""
        self.entries.append(Seed(seed))

    def cancel(self) -> None:
        """Learn that of the operations since the last answer some have run and others never will.

        None of them is carried out again. Which it was nobody has said: so what they have made or written is lost if
        the server dies. Views are made again, which computes nothing.
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
                if signature.is_random:
                    lost[GENERATOR_HANDLE] = None
        unknown = TensorSpec(torch.Size(), (), 0, torch.uint8, torch.device("cpu"))
        self.entries += [Upload(number, None, None, spec or unknown, "it was being computed when the session was "
                                "interrupted", is_whole=False) for number, spec in lost.items()]
        self.settled = len(self.entries)

    def add_checkpoint(self, snapshots: Sequence[Snapshot], generators: Generators | None) -> None:
        """Learn what values and random numbers are now, and forget how they came to be."""
        for snapshot in snapshots:
            self.size_bytes += snapshot.kept.size_bytes
        if generators is not None:
            self.size_bytes += sum(size_of(state) for _, state in generators.states)
            self.entries.append(generators)
        self.entries.extend(snapshots)
        self.settled = len(self.entries)
        self.compact()

    def measured(self, took_s: float) -> None:
        """Learn how long the operations took, all together, that were handed over since the last call."""
        if not self.unmeasured:
            return
        self._measured_s += took_s
        self.node_s = self._cut.node_s = took_s / self.unmeasured
        self.unmeasured = 0
        self._cut = Cut()

    def costs(self) -> list[float]:
        """Say how many seconds each entry takes to be carried out again; 0 if it is not known yet."""
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
        """Return what stands for the storage of a value; storages that a value has belonged to in turn are one."""
        return self._root(slot.storage) if self._merged else slot.storage

    def is_merged(self, storage: int) -> bool:
        """Whether a value was moved into a storage, or out of it."""
        return storage in self._merged

    def merge(self, one: int, other: int) -> None:
        """Regard two storages as one from now on, and in all that was before."""
        one, other = self._root(one), self._root(other)
        if one != other:
            self._merged[one] = other
            self._merged.setdefault(other, other)

    def compact(self) -> None:
        """Forget what no value needs any more."""
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
        """Look up what is known of a value; for messages and plans, not quick."""
        for entry in reversed(self.entries):
            if isinstance(entry, Upload) and entry.number == number:
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
    """Tell which entries must be carried out again so that every live value is what it is.

    An operation is needed if it gives a value that is needed, or writes a storage that is read behind it, or if all
    that may come of it is a failure that nobody has heard of. What only read is forgotten: nothing is carried out in
    another order.

    Args:
        entries: A journal's.
        journal: Says what is live.
        more: Entries to be thought of behind them.
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
                (signature.is_random and GENERATOR in reads)
                or any(slot.number in values for slot in entry.outputs)
                or any(storage_of(inputs[index]) in reads for index in signature.writes)
                or (not entry.outputs and not signature.writes and position >= journal.settled)
            ):
                needed[position] = True
                for slot in inputs:
                    values.add(slot.number)
                    reads.add(storage_of(slot))
                if signature.is_random:
                    reads.add(GENERATOR)
        else:
            needed[position] = _is_needed(entry, values, reads, journal)
    return needed[:len(entries)]


def _is_needed(entry: Upload | Seed | Generators | Snapshot | Cut, values: set[int], reads: set[int],
               journal: Journal) -> bool:
    """Tell of an entry that is no operation, and take away what nothing before it needs to give."""
    if isinstance(entry, Cut):
        return True
    if isinstance(entry, Snapshot):
        is_needed = not values.isdisjoint(entry.made)
        values -= entry.made
        if not journal.is_merged(entry.number):
            # Of storages that count as one, it has the contents of one only.
            reads.discard(entry.number)
        return is_needed
    if isinstance(entry, Upload) and entry.number != GENERATOR_HANDLE:
        return entry.number in values
    is_needed = GENERATOR in reads
    if not isinstance(entry, Upload) or entry.is_whole:
        reads.discard(GENERATOR)
    return is_needed


def kept_bytes(entry: Entry) -> int:
    """Return the bytes of tensors that are kept for an entry."""
    if isinstance(entry, Generators):
        return sum(size_of(state) for _, state in entry.states)
    kept = entry.kept if isinstance(entry, (Upload, Snapshot)) else None
    return 0 if kept is None else kept.size_bytes
