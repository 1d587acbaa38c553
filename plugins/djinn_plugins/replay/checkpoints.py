"""Chooses the values that are cheaper to fetch than to recompute."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress

import attrs

from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.ir.value import Slot
from djinn.wire.tensors import is_dense
from djinn_plugins.graph.views import changes_metadata
from djinn_plugins.replay.entries import Entry, Generators, Snapshot, UploadEntry, is_plain_view
from djinn_plugins.replay.journal import Journal, kept_bytes, needed_entries
from djinn_plugins.replay.retained import Kept

MAX_WEIGHED = 3
"""How many of the largest storages are considered individually: cheaper to fetch or to recompute?"""
MIN_WEIGHED_SHARE = 0.01
"""Storages that take a smaller fraction of the total time to fetch are not considered individually."""


@attrs.frozen(eq=False)
class FetchCandidate:
    """A storage that could be fetched: its owner's slot and metadata, and the operations that make its other values."""

    slot: Slot
    spec: TensorSpec
    nodes: Sequence[Node]

    def snapshot(self, kept: Kept) -> Snapshot:
        """Create the journal entry from the contents."""
        made = {slot.number for node in self.nodes for slot in node.outputs}
        return Snapshot(self.slot.number, kept, self.spec, self.nodes, frozenset({self.slot.number, *made}))


@attrs.frozen(eq=False)
class FetchPlan:
    """The storages to fetch.

    Attributes:
        candidates: The storages.
        operations: How many operations the journal has.
        left_s: How long a recovery would take afterwards.
        size_bytes: Total size of the storages.
        left_bytes: Bytes kept afterwards, including these storages.
    """

    candidates: Sequence[FetchCandidate]
    operations: int
    left_s: float
    size_bytes: int
    left_bytes: int


def candidates_of(journal: Journal, excluded: Collection[int] = ()) -> list[FetchCandidate]:
    """List storages that operations have written, and whose values can all be rebuilt from one dense tensor."""
    producers: dict[int, Node] = {}
    specs: dict[int, TensorSpec | None] = {}
    changed: set[int] = set()
    tainted = set(excluded)
    for entry in journal.entries:
        if isinstance(entry, Snapshot):
            changed.discard(entry.number)
            specs[entry.number] = entry.spec
            producers.update((slot.number, node) for node in entry.nodes for slot in node.outputs)
        elif isinstance(entry, UploadEntry):
            specs[entry.number] = entry.spec
        elif isinstance(entry, Node):
            _look_at(entry, producers, specs, changed, tainted, journal)
    groups: dict[int, list[int]] = {}
    for number, slot in journal.live.items():
        groups.setdefault(slot.storage, []).append(number)
    found = []
    for storage, numbers in groups.items():
        spec = specs.get(storage)
        is_possible = storage in changed and storage in journal.live and storage not in tainted
        if not is_possible or journal.is_merged(storage) or spec is None or not _fills_its_storage(spec):
            continue
        nodes = _views(storage, numbers, producers)
        if nodes is not None:
            found.append(FetchCandidate(journal.live[storage], spec, nodes))
    return found


def _look_at(node: Node, producers: dict[int, Node], specs: dict[int, TensorSpec | None], changed: set[int],
             tainted: set[int], journal: Journal) -> None:
    signature = node.signature
    for slot, spec in zip(node.outputs, signature.results, strict=False):
        producers[slot.number] = node
        if slot.number == slot.storage:
            specs[slot.number] = spec
            changed.add(slot.storage)
    written = [node.inputs[index].storage for index in signature.writes]
    changed.update(written)
    if written and changes_metadata(signature.template.operator):
        tainted.update(written)


def _fills_its_storage(spec: TensorSpec) -> bool:
    return not spec.storage_offset and spec.size_bytes > 0 and is_dense(tuple(spec.size), spec.stride)


def _views(owner: int, numbers: Sequence[int], producers: dict[int, Node]) -> list[Node] | None:
    """List the operations that derive a storage's values from its owner; ``None`` if that is not possible."""
    nodes: dict[int, Node] = {}
    for number in numbers:
        chain: list[Node] = []
        while number != owner:
            node = producers.get(number)
            if node is None or not is_plain_view(node):
                return None
            chain.append(node)
            number = node.inputs[0].number  # noqa: PLW2901  # walks up to the owner
        nodes.update((id(node), node) for node in reversed(chain))
    return list(nodes.values())


def plan(journal: Journal, costs: Sequence[float], bytes_per_s: float, excluded: Collection[int] = ()) -> FetchPlan:
    """Choose the storages to fetch.

    Args:
        journal: The journal.
        costs: For each of its entries, the seconds needed to repeat it.
        bytes_per_s: Transfer rate to the client.
        excluded: Numbers of values that cannot be fetched.
    """
    chosen = candidates_of(journal, excluded)
    needed = _after(journal, chosen)
    left_s = sum(compress(costs, needed))
    worth_weighing = MIN_WEIGHED_SHARE * sum(costs) * bytes_per_s
    for candidate in sorted(chosen, key=lambda one: -one.spec.size_bytes)[:MAX_WEIGHED]:
        if candidate.spec.size_bytes < worth_weighing:
            break
        others = [one for one in chosen if one is not candidate]
        without = _after(journal, others)
        without_s = sum(compress(costs, without))
        if without_s - left_s < candidate.spec.size_bytes / bytes_per_s:
            chosen, needed, left_s = others, without, without_s
    size_bytes = sum(candidate.spec.size_bytes for candidate in chosen)
    left_bytes = sum(map(kept_bytes, compress(journal.entries, needed)))
    return FetchPlan(chosen, journal.node_count, left_s, size_bytes, left_bytes + size_bytes)


def _after(journal: Journal, candidates: Sequence[FetchCandidate]) -> list[bool]:
    """Return which entries a recovery would still need if these storages and the random states were known."""
    empty = Kept.nothing()
    more: list[Entry] = [Generators((), ""), *(candidate.snapshot(empty) for candidate in candidates)]
    return needed_entries(journal.entries, journal, more)
