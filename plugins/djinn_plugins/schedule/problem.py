"""A graph and its devices as numbers, for schedulers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.errors import ScheduleError
from djinn.ir.spec import TensorSpec
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.metadata import MemoryPattern
from djinn_plugins.schedule.schedule import DeviceInfo, LinkProfile
from djinn_plugins.schedule.semantics import STAYING, meaning_of

NOWHERE = -1
"""Represents no node, or no device."""
_RANDOM = -1
_LARGE_BYTES = 1 << 16
_PLAIN_BYTES = 8
"""Assumed size of a value that is not a tensor."""
_DEFAULT_LINK = LinkProfile()
_FAR = 10**9
"""Bytes at which the slope of a link is determined; its seconds are linear in bytes."""


class Problem:
    """A graph and its devices as numbers.

    Nodes are numbered in program order, values in order of appearance, devices in the given order.

    Raises:
        ScheduleError: There is no device.
    """

    def __init__(self, graph: Graph, devices: Sequence[DeviceInfo]) -> None:
        if not devices:
            raise ScheduleError("There is no device to schedule on.", hint="Connect an executor first.")
        self.graph = graph
        self.nodes: Sequence[GraphNode] = graph.topological_sort()
        self.devices = tuple(devices)
        self.values: list[str] = []
        """Identifiers."""
        self.size: list[int] = []
        """Bytes, by value."""
        self.maker: list[int] = []
        """Node, by value; `NOWHERE` for those from outside."""
        self.reads: list[tuple[int, ...]] = []
        """Values, each once, by node."""
        self.makes: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        self._number: dict[str, int] = {}
        self._number_values()
        self.root: list[int] = [self._number.get(graph.storages.get(name, name), index)
                                for index, name in enumerate(self.values)]
        """By value: the value that represents its storage."""
        self.is_random = [node.is_random for node in self.nodes]
        self.before: list[list[int]] = []
        """Predecessors of each node, including hazards."""
        self.after: list[list[int]] = [[] for _ in self.nodes]
        self._connect()
        self._weigh()
        self._look_at_devices()

    def _number_values(self) -> None:
        sizes: dict[TensorSpec | None, int] = {None: _PLAIN_BYTES}
        number, values, size, maker = self._number, self.values, self.size, self.maker

        def numbers(names: Iterable[str], specs: Sequence[TensorSpec | None], node: int) -> tuple[int, ...]:
            found = []
            for position, name in enumerate(names):
                index = number.get(name)
                if index is None:
                    spec = specs[position] if position < len(specs) else None
                    if spec is None and name in known:
                        spec = known[name].spec
                    if spec not in sizes:
                        sizes[spec] = spec.size_bytes if spec is not None else _PLAIN_BYTES
                    index = number[name] = len(values)
                    values.append(name)
                    size.append(sizes[spec])
                    maker.append(node)
                found.append(index)
            return tuple(found)

        known = self.graph.values
        for position, node in enumerate(self.nodes):
            self.reads.append(tuple(dict.fromkeys(numbers(node.inputs, node.input_specs, NOWHERE))))
            self.makes.append(numbers(node.outputs, node.specs, position))
            self.writes.append(tuple(dict.fromkeys(map(number.__getitem__, node.writes))) if node.writes else ())

    def _connect(self) -> None:
        """Find the predecessors of each node, as `djinn_plugins.graph.graph.RecordedGraph.edges` does."""
        root, maker = self.root, self.maker
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for node, reads in enumerate(self.reads):
            before = {maker[value] for value in reads}
            storages = {root[value] for value in reads}
            written = {root[value] for value in self.writes[node]}
            if self.is_random[node]:
                storages.add(_RANDOM)
                written.add(_RANDOM)
            for storage in storages:
                before.add(writer.get(storage, NOWHERE))
                if storage in written:
                    before.update(readers.pop(storage, ()))
                    writer[storage] = node
                elif storage in readers:
                    readers[storage].append(node)
                else:
                    readers[storage] = [node]
            before.discard(NOWHERE)
            before.discard(node)
            ordered = sorted(before)
            self.before.append(ordered)
            for earlier in ordered:
                self.after[earlier].append(node)

    def _weigh(self) -> None:
        """Determine the costs and properties of nodes."""
        kinds: dict[tuple[float, float, MemoryPattern], int] = {}
        self._kind: list[int] = []
        self.priority: list[int] = []
        self.is_view: list[bool] = []
        self.may_repeat: list[bool] = []
        """Whether a node writes nothing and draws no random numbers, and is a view or marked as cheaper to run than to
        move.
        """
        self.outlives: list[bool] = [maker == NOWHERE for maker in self.maker]
        """By value: whether it is needed after the graph, as far as known. This includes values that no node reads."""
        size, root = self.size, self.root
        for known, reads, makes in zip(self.nodes, self.reads, self.makes, strict=True):
            meaning = meaning_of(known)
            pure = not known.writes and not known.is_random
            is_view = pure and bool(makes) and all(root[value] != value for value in makes)
            if meaning is None:
                moved = 0.0 if is_view else float(sum(size[value] for value in reads) + sum(size[v] for v in makes))
                work = (0.0, moved, MemoryPattern.NONE if is_view else MemoryPattern.SEQUENTIAL)
                self.priority.append(0)
            else:
                work = (meaning.flops, meaning.bytes_read + meaning.bytes_written, meaning.memory_pattern)
                self.priority.append(meaning.priority)
                if not meaning.data_lineage.last_use and meaning.data_lineage.producers + meaning.data_lineage.sources:
                    for value in makes:
                        self.outlives[value] = True
            self.is_view.append(is_view)
            self.may_repeat.append(is_view or (pure and meaning is not None and meaning.can_recompute))
            self._kind.append(kinds.setdefault(work, len(kinds)))
        read = {value for reads in self.reads for value in reads}
        for value in range(len(self.values)):
            if value not in read:
                self.outlives[value] = True
        self._works = list(kinds)

    def _look_at_devices(self) -> None:
        devices = self.devices
        outside = {name for name, maker in zip(self.values, self.maker, strict=True) if maker == NOWHERE}
        self.held: dict[int, int] = {}
        """By storage: the device that holds it, if there is one."""
        self.copies: dict[int, list[int]] = {}
        """By value: the devices that hold copies of it."""
        for index, device in enumerate(devices):
            for name in sorted(outside & device.holds):
                self.held.setdefault(self.root[self._number[name]], index)
        for index, device in enumerate(devices):
            for name in sorted(outside & device.copies):
                value = self._number[name]
                if self.held.get(self.root[value]) != index:
                    self.copies.setdefault(value, []).append(index)
        self.stays: list[bool] = [False] * len(self.values)
        """By value: whether it is a weight, a cache or similar, and not a small one."""
        for name, info in self.graph.values.items():
            if info.kind in STAYING and name in outside and self.size[self._number[name]] >= _LARGE_BYTES:
                self.stays[self._number[name]] = True
        same: list[DeviceInfo] = []
        self._class: list[int] = []
        for device in devices:
            found = next((index for index, other in enumerate(same)
                          if other.profile == device.profile and other.load == device.load), len(same))
            if found == len(same):
                same.append(device)
            self._class.append(found)
        self._same = same
        self._seconds: list[list[float | None]] = [[None] * len(self._works) for _ in same]
        self.links: list[list[LinkProfile]] = [
            [device.links.get(other.id, _DEFAULT_LINK) for other in devices] for device in devices]
        """By source and target."""
        lines = {link: (link.seconds(0), (link.seconds(_FAR) - link.seconds(0)) / _FAR)
                 for row in self.links for link in row}
        self.lines: list[tuple[float, float]] = [lines[link] for row in self.links for link in row]
        """By source times the number of devices plus target: seconds per transfer, and seconds per byte."""
        self.is_uniform = len({link for source, row in enumerate(self.links) for target, link in enumerate(row)
                               if source != target}) <= 1
        """Whether all links are equal."""

    def moving_s(self, value: int, source: int, target: int) -> float:
        """Predict how long it takes to move a value."""
        latency_s, byte_s = self.lines[source * len(self.devices) + target]
        return latency_s + self.size[value] * byte_s

    def seconds(self, node: int, device: int) -> float:
        """Predict how long a node takes on a device, including the load from other sessions.

        Source:
            With one queue before the device, exponential times between arrivals and of service (M/M/1), work that takes
            s seconds alone takes s / (1 - load). Kleinrock, "Queueing Systems", volume 1, section 3.2.
        """
        kind, row = self._kind[node], self._class[device]
        known = self._seconds[row][kind]
        if known is None:
            info = self._same[row]
            known = self._seconds[row][kind] = info.profile.seconds(*self._works[kind]) / (1.0 - info.load)
        return known

    def durations(self, device: int) -> list[float]:
        """Predict how long each node takes on a device."""
        seconds = self.seconds
        return [seconds(node, device) for node in range(len(self.nodes))]

    def kinds_of_devices(self) -> list[int]:
        """Return, by device, the first device with the same speed."""
        first: dict[int, int] = {}
        return [first.setdefault(row, index) for index, row in enumerate(self._class)]

    def room(self) -> list[float]:
        """Return the bytes that each device has left."""
        return [float("inf") if device.memory_bytes is None else float(device.memory_bytes - device.held_bytes)
                for device in self.devices]
