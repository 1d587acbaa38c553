"""Memory use of a graph: the bytes held while it runs, by device and phase."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.schedule.schedule import CachingPolicy, DeviceInfo, ExecutionSchedule, Transfer
from djinn_plugins.schedule.semantics import meaning_of

__all__ = ("MemoryEstimate", "MemoryEstimator")


@attrs.frozen
class MemoryEstimate:
    """Most bytes that are held at once."""

    peaks: Mapping[str, int]
    """By device, including bytes held before."""
    phases: Mapping[str, Mapping[ExecutionPhase, int]]
    """By device, while nodes of each phase run there."""


class MemoryEstimator:
    """Tracks the lifetime of storages in a graph: from the node that creates one to the last that reads a value in it.

    The accounting matches the executor's: operands and results of a call are held together while it runs, and values
    are freed right after their last use. The workspace that a call needs is not known and not counted.

    Args:
        graph: The graph. Sizes come from the metadata of its values.
        outlives: Values that are still referenced after the graph. By default, those that no node reads.
    """

    def __init__(self, graph: Graph, outlives: Collection[str] | None = None) -> None:
        nodes = graph.nodes()
        self._nodes: Mapping[str, GraphNode] = {node.id: node for node in nodes}
        self._storages = graph.storages
        made = {value for node in nodes for value in node.outputs}
        read = {value for node in nodes for value in node.inputs}
        kept = made - read if outlives is None else set(outlives)
        self._made = {self._base(value) for value in made} - {self._base(value) for value in read - made}
        """Storages that nodes create. If only a view of a storage occurs, the storage is from outside."""
        self._kept = {self._base(value) for value in kept}
        self._sizes = self._measure(graph, nodes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once if all nodes run in program order on one device, including operands from outside."""
        order = tuple(self._nodes)
        plain = ExecutionSchedule(order, dict.fromkeys(order, ""))
        return self.estimate(plain).peaks.get("", self._outside_bytes())

    def estimate(self, schedule: ExecutionSchedule, devices: Sequence[DeviceInfo] = ()) -> MemoryEstimate:
        """Compute the memory use of a schedule.

        A copy of a value is in transit from the moment when the first node on the target waits for it, and is freed
        after its last use there. Values from outside stay.

        Args:
            schedule: A schedule of this graph.
            devices: The devices with their contents, if known; otherwise they hold what the graph reads from outside.
        """
        steps = list(self._steps(schedule))
        lives = self._lives(schedule, steps)
        held = self._held_before(schedule, devices, lives)
        peaks = dict(held)
        phases: dict[str, dict[ExecutionPhase, int]] = {device: {} for device in held}
        begins, ends = self._changes(lives, is_end=False), self._changes(lives, is_end=True)
        for position, (identifier, device) in enumerate(steps):
            for where, size in begins.get(position, ()):
                held[where] += size
                peaks[where] = max(peaks[where], held[where])
            meaning = meaning_of(self._nodes[identifier])
            phase = ExecutionPhase.UNKNOWN if meaning is None else meaning.execution_phase
            seen = phases.setdefault(device, {})
            seen[phase] = max(seen.get(phase, 0), held.get(device, 0))
            for where, size in ends.get(position, ()):
                held[where] -= size
        return MemoryEstimate(peaks, phases)

    def _base(self, value: str) -> str:
        return self._storages.get(value, value)

    def _measure(self, graph: Graph, nodes: Iterable[GraphNode]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        known = [(value, info.spec) for value, info in graph.values.items()]
        for node in nodes:
            known += zip(node.outputs, node.specs, strict=False)
            known += zip(node.inputs, node.input_specs, strict=False)
        for value, spec in known:
            if spec is not None:
                base = self._base(value)
                sizes[base] = max(sizes.get(base, 0), spec.reach_bytes)
        return sizes

    def _outside_bytes(self) -> int:
        return sum(size for base, size in self._sizes.items() if base not in self._made)

    @staticmethod
    def _steps(schedule: ExecutionSchedule) -> Iterator[tuple[str, str]]:
        for identifier in schedule.order:
            yield identifier, schedule.devices[identifier]
            for device in schedule.replicas.get(identifier, ()):
                yield identifier, device

    def _lives(
        self, schedule: ExecutionSchedule, steps: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[int, int]]:
        """For each storage and device: the step at which it first exists there, and the last step that needs it."""
        lives: dict[tuple[str, str], tuple[int, int]] = {}
        homes: dict[str, str] = {}
        for position, (identifier, device) in enumerate(steps):
            node = self._nodes[identifier]
            for value in (*node.inputs, *node.outputs):
                base = self._base(value)
                begin, _ = lives.get((base, device), (position, position))
                lives[base, device] = begin, position
                homes.setdefault(base, device)
        self._hold_until_moved(schedule.transfers, lives)
        stays = {self._base(value) for value, policy in schedule.caching.items() if policy is CachingPolicy.PERSIST}
        for base, device in [key for key in lives if key[0] in self._kept | stays]:
            if homes.get(base) == device:
                lives[base, device] = lives[base, device][0], len(steps)
        return lives

    def _hold_until_moved(
        self, transfers: Sequence[Transfer], lives: dict[tuple[str, str], tuple[int, int]]
    ) -> None:
        """Extend lifetimes so that the source of each transfer holds the value until it arrives, also within chains."""
        pending = list(transfers)
        while pending:
            later = []
            for transfer in pending:
                base = self._base(transfer.value)
                arrival = lives.get((base, transfer.target))
                if arrival is None:
                    later.append(transfer)
                    continue
                begin, end = lives.get((base, transfer.source), (arrival[0], arrival[0]))
                lives[base, transfer.source] = begin, max(end, arrival[0])
            if len(later) == len(pending):
                break
            pending = later

    def _held_before(
        self, schedule: ExecutionSchedule, devices: Sequence[DeviceInfo],
        lives: dict[tuple[str, str], tuple[int, int]],
    ) -> dict[str, int]:
        """Remove values from outside from ``lives``, and return what each device holds all the time."""
        held = {device: 0 for _, device in lives} | {device.id: device.held_bytes for device in devices}
        counted = {(self._base(value), device.id) for device in devices for value in (*device.holds, *device.copies)}
        moved = {(self._base(transfer.value), transfer.target) for transfer in schedule.transfers}
        for base, device in list(lives):
            if base in self._made or ((base, device) in moved and (base, device) not in counted):
                continue
            if (base, device) not in counted:
                held[device] += self._sizes.get(base, 0)
            del lives[base, device]
        return held

    def _changes(
        self, lives: Mapping[tuple[str, str], tuple[int, int]], *, is_end: bool
    ) -> dict[int, list[tuple[str, int]]]:
        """By step: the devices that allocate, or free, and how many bytes."""
        changes: dict[int, list[tuple[str, int]]] = {}
        for (base, device), life in lives.items():
            changes.setdefault(life[is_end], []).append((device, self._sizes.get(base, 0)))
        return changes
