"""Restores all values on a new server."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import attrs
import torch

from djinn.errors import DjinnError
from djinn.ir.tape import Node, Tape
from djinn.kinds import Backend
from djinn.wire.messages import GENERATOR_HANDLE
from djinn_plugins.common.device_report import device_of
from djinn_plugins.replay.entries import Cut, Entry, Generators, SeedEntry, Snapshot, UploadEntry, outputs_of
from djinn_plugins.replay.journal import Journal
from djinn_plugins.replay.losses import LostValues
from djinn_plugins.replay.retained import Kept, size_of

log = logging.getLogger("djinn.recovery")


@attrs.frozen(eq=False)
class ReplayTarget:
    """A backend for the present connections, with its tape and its queue of released values."""

    backend: Backend
    tape: Tape
    released: deque[int]

    @property
    def is_broken(self) -> bool:
        """Whether a connection is gone."""
        return any(executor.is_broken for executor in self.backend.executors)

    @property
    def device_kind(self) -> str:
        """The kind of device at the other end."""
        return device_of(self.backend.welcome).kind

    def settle(self) -> None:
        """Wait until all submitted work has run. Failures are not reported, because they were reported before.

        Raises:
            DjinnError: A connection is lost.
        """
        for executor in self.backend.executors:
            executor.submit()
        for executor in self.backend.executors:
            try:
                executor.synchronize()
            except Exception as error:
                if self.is_broken:
                    raise
                log.debug("failed again: %s", error)


class Replay:
    """Executes a journal.

    Args:
        journal: The journal.
        hands: Submits the work; its executors hold no values yet.

    Attributes:
        losses: Values that could not be restored.
        nodes: Operations executed.
        size_bytes: Bytes of kept tensors that were sent.
    """

    def __init__(self, journal: Journal, hands: ReplayTarget) -> None:
        self.losses = LostValues(journal)
        self.nodes = 0
        self.size_bytes = 0
        self._journal = journal
        self._hands = hands
        self._present: set[int] = set()
        self._pending: list[Node] = []

    def run(self) -> None:
        """Execute the whole journal.

        Raises:
            DjinnError: A connection is lost.
        """
        entries = self._journal.entries
        leaving = _last_uses(entries, set(self._journal.live))
        gone: list[int] = []
        for position, entry in enumerate(entries):
            if position == self._journal.settled:
                self._hand_over(gone)
                self._hands.settle()
            if isinstance(entry, Node):
                self._add(entry)
            else:
                self._hand_over(gone)
                if not isinstance(entry, Cut):
                    self._put(entry)
            gone += leaving.get(position, ())
        self._hand_over(gone)
        if self._journal.settled >= len(entries):
            self._hands.settle()

    def _add(self, node: Node) -> None:
        if self.losses.allows(node):
            self._pending.append(node)
            self._present.update(slot.number for slot in node.outputs)

    def _hand_over(self, gone: list[int]) -> None:
        """Submit pending operations, free the values in ``gone``, and clear that list."""
        if not self._pending and not gone:
            return
        leaving = [number for number in gone if number in self._present]
        self._present.difference_update(leaving)
        self._hands.tape.nodes.extend(self._pending)
        self._hands.released.extend(leaving)
        self.nodes += len(self._pending)
        self._pending = []
        gone.clear()
        try:
            self._hands.backend.flush()
        except DjinnError as error:
            if self._hands.is_broken:
                raise
            # It failed the first time as well; the server does not know the results, as before.
            log.debug("refused again: %s", error)

    def _put(self, entry: UploadEntry | SeedEntry | Generators | Snapshot) -> None:
        backend = self._hands.backend
        if isinstance(entry, SeedEntry):
            backend.seed(entry.seed)
            self.losses.restore(GENERATOR_HANDLE)
        elif isinstance(entry, Generators):
            self._put_generators(entry)
        elif isinstance(entry, UploadEntry):
            why = self._why_lost(entry)
            if why:
                self.losses.lose(entry.number, why)
                return
            assert entry.kept is not None
            if entry.number == GENERATOR_HANDLE and entry.is_whole:
                self.losses.restore(GENERATOR_HANDLE)
            self._send(entry.number, entry.kept, entry.device)
        else:
            self._put_snapshot(entry)

    @staticmethod
    def _why_lost(entry: UploadEntry) -> str:
        if entry.kept is None:
            return entry.why
        return "" if entry.kept.is_unchanged else "the tensor that it was sent from has been changed since"

    def _put_generators(self, entry: Generators) -> None:
        if entry.kind != self._hands.device_kind:
            self.losses.lose(GENERATOR_HANDLE, f"their state is that of a {entry.kind} device, and now a "
                                               f"{self._hands.device_kind} device computes")
            return
        self.losses.restore(GENERATOR_HANDLE)
        for device, state in entry.states:
            self._send(GENERATOR_HANDLE, Kept(state), device)

    def _put_snapshot(self, entry: Snapshot) -> None:
        # Values of this storage that exist already hold contents from before the snapshot.
        before = [number for number in entry.made if number in self._present]
        if before:
            self._present.difference_update(before)
            self._hands.released.extend(before)
            self._hands.backend.flush()
        self.losses.restore(entry.number, entry.made)
        self._send(entry.number, entry.kept, entry.spec.device)
        for node in entry.nodes:
            self._add(node)

    def _send(self, number: int, kept: Kept, device: torch.device | None) -> None:
        self._hands.backend.upload(number, kept.tensor, device)
        self.size_bytes += size_of(kept.tensor)
        if number != GENERATOR_HANDLE:
            self._present.add(number)


def _last_uses(entries: Sequence[Entry], live: set[int]) -> dict[int, list[int]]:
    """Return by position the values that are used there for the last time and are not live."""
    last: dict[int, int] = {}
    for position, entry in enumerate(entries):
        if isinstance(entry, Node):
            for slot in entry.inputs:
                last[slot.number] = position
        for slot in outputs_of(entry):
            last[slot.number] = position
        if isinstance(entry, (UploadEntry, Snapshot)):
            last[entry.number] = position
    leaving: dict[int, list[int]] = {}
    for number, position in last.items():
        if number not in live and number != GENERATOR_HANDLE:
            leaving.setdefault(position, []).append(number)
    return leaving
