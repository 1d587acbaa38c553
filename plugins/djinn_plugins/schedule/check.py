"""The rules for schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from djinn.errors import ScheduleError
from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule, Transfer

RULES: Mapping[str, str] = {
    "complete": "Every node of the graph is ordered once, and nothing else is.",
    "devices": "Nodes, replicas, placements and transfers name given devices; a transfer names two different ones.",
    "order": "Every edge, data or hazard, points forward.",
    "placements": "Values from outside are placed that no device holds, all values of one storage on one device.",
    "replicas": "What runs on several devices writes nothing, draws nothing, and is of use on each of them.",
    "home": "What writes a storage or makes a view of it runs at its home, or writes back what it wrote elsewhere.",
    "transfers": "What is read is there as it is at that moment, and what moves is where it moves from.",
    "needless": "What moves was not there before, and is read there.",
    "budgets": "No device is to hold more than its memory.",
}
"""The rules that `check_schedule` checks, in this order."""


def check_schedule(schedule: ExecutionSchedule, graph: Graph, devices: Sequence[DeviceInfo]) -> None:
    """Check a schedule against its graph.

    The home of a storage is the device that holds one of its outside values, where one is placed, or where the node
    that created it runs. A storage that no device holds and that is not placed has its home on the first device. On the
    home device, all values of a storage are current. On any other device a value is as it was when it arrived, and
    becomes stale once its storage is written.

    Raises:
        ScheduleError: Names the first of `RULES` that is broken.
    """

    def refuse(rule: str, what: str) -> ScheduleError:
        return ScheduleError(f"The schedule of {schedule.scheduler or 'a scheduler'} breaks the rule {rule!r}: {what}.",
                             hint="Nothing was run. Choose another scheduler or report this to its author.")

    try:
        _check_names(schedule, graph, devices)
        _check_order(schedule, graph)
        _Walk(schedule, graph, devices).check()
        _check_budgets(schedule, devices)
    except _BrokenError as error:
        raise refuse(error.rule, error.what) from None


class _BrokenError(Exception):
    def __init__(self, rule: str, what: str) -> None:
        super().__init__(rule, what)
        self.rule = rule
        self.what = what


def _check_names(schedule: ExecutionSchedule, graph: Graph, devices: Sequence[DeviceInfo]) -> None:
    expected = {node.id for node in graph.nodes()}
    if len(schedule.order) != len(expected) or set(schedule.order) != expected:
        raise _BrokenError("complete", f"{len(expected)} nodes are to run, it orders {len(schedule.order)}")
    known = {device.id for device in devices}
    for node in schedule.order:
        if schedule.devices.get(node) not in known:
            raise _BrokenError("devices", f"node {node} is placed on {schedule.devices.get(node)!r}")
    for transfer in schedule.transfers:
        if transfer.source == transfer.target or not {transfer.source, transfer.target} <= known:
            raise _BrokenError("devices", f"{transfer.value} moves from {transfer.source!r} to {transfer.target!r}")
    if unknown := set(schedule.placements.values()) - known:
        raise _BrokenError("devices", f"a value is placed on {min(unknown)!r}")
    for node, places in schedule.replicas.items():
        if node not in expected:
            raise _BrokenError("complete", f"there is no node {node} that could run on several devices")
        if len({schedule.devices[node], *places}) != len(places) + 1 or not known.issuperset(places):
            raise _BrokenError("devices", f"node {node} runs on {', '.join([schedule.devices[node], *places])}")


def _check_order(schedule: ExecutionSchedule, graph: Graph) -> None:
    position = {node: index for index, node in enumerate(schedule.order)}
    for edge in graph.edges():
        if position[edge.source] >= position[edge.target]:
            raise _BrokenError(
                "order", f"{edge.target} needs {edge.source} ({edge.kind} {edge.value}) and runs before it")


def _check_budgets(schedule: ExecutionSchedule, devices: Sequence[DeviceInfo]) -> None:
    for device in devices:
        budget = schedule.budgets.get(device.id)
        if budget is not None and device.memory_bytes is not None and budget > device.memory_bytes:
            raise _BrokenError("budgets", f"{device.id} is to hold {budget} bytes and has {device.memory_bytes}")


class _Walk:
    """Simulates the schedule, and tracks which value is where in which version."""

    def __init__(self, schedule: ExecutionSchedule, graph: Graph, devices: Sequence[DeviceInfo]) -> None:
        self._schedule = schedule
        self._graph = graph
        self._nodes = {node.id: node for node in graph.nodes()}
        self._storages = graph.storages
        self._first = devices[0].id if devices else ""
        self._home: dict[str, str] = {}
        """By storage."""
        self._copies: dict[str, set[str]] = {}
        """By value: the other devices that have its current version."""
        self._copied: dict[str, set[str]] = {}
        """By storage: values of it that have copies."""
        self._made: dict[str, int] = {}
        """By value: position of its producer."""
        self._written: dict[str, int] = {}
        """By storage: position of the last node that wrote to it."""
        self._due: dict[str, list[Transfer]] = {}
        self._waiting: dict[tuple[str, str], list[Transfer]] = {}
        self._read: set[tuple[str, str, str]] = set()
        """Values read away from home: value, device, and the node that produced that version of it."""
        self._away: dict[tuple[str, str], str] = {}
        """By value and node: where the node wrote it, if that was not its home."""
        for transfer in schedule.transfers:
            self._due.setdefault(transfer.after, []).append(transfer)
        self._begin(devices)

    def _begin(self, devices: Sequence[DeviceInfo]) -> None:
        made = {value for node in self._nodes.values() for value in node.outputs}
        outside = {value for node in self._nodes.values() for value in node.inputs} - made
        for device in devices:
            for value in outside & device.holds:
                self._home.setdefault(self._storage(value), device.id)
        held = set(self._home)
        for value, place in self._schedule.placements.items():
            storage = self._storage(value)
            if value not in outside:
                raise _BrokenError("placements", f"{value} does not come from outside")
            if storage in held:
                raise _BrokenError("placements", f"{value} is held by {self._home[storage]} already")
            if self._home.setdefault(storage, place) != place:
                raise _BrokenError("placements",
                                   f"{value} shares its storage with a value on {self._home[storage]}")
        for device in devices:
            for value in outside & device.copies:
                if self._home_of(value) != device.id:
                    self._copies.setdefault(value, set()).add(device.id)
                    self._copied.setdefault(self._storage(value), set()).add(value)
        for transfer in self._due.pop("", ()):
            if transfer.value not in outside:
                raise _BrokenError("transfers", f"{transfer.value} moves before it is made")
            self._depart(transfer)

    def check(self) -> None:
        order, devices, replicas = self._schedule.order, self._schedule.devices, self._schedule.replicas
        for position, name in enumerate(order):
            node, place = self._nodes[name], devices[name]
            self._read_all(node, place)
            further = replicas.get(name, ())
            if further:
                if node.writes or node.is_random:
                    raise _BrokenError("replicas", f"{name} writes or draws and runs on several devices")
                for other in further:
                    self._read_all(node, other)
            self._make(node, place, position)
            if node.writes:
                self._write(node, place, position)
            for other in further:
                for value in node.outputs:
                    self._arrive(value, other)
            for transfer in self._due.pop(name, ()):
                if self._version(transfer.value) != name:
                    raise _BrokenError("transfers", f"{transfer.value} is not what {name} makes of it")
                self._depart(transfer)
        self._finish()

    def _finish(self) -> None:
        if left := [transfer for waiting in (self._due, self._waiting) for entry in waiting.values()
                    for transfer in entry]:
            lost = left[0]
            state = f"as {lost.after} leaves it" if lost.after else "as it was before"
            raise _BrokenError("transfers", f"{lost.value} is to move from {lost.source} to {lost.target}, and is "
                                            f"never on {lost.source} {state}")
        for transfer in self._schedule.transfers:
            written = self._away.get((transfer.value, transfer.after)) is not None
            if (transfer.value, transfer.target, transfer.after) not in self._read and not (
                    written and transfer.target == self._home_of(transfer.value)):
                raise _BrokenError("needless", f"{transfer.value} moves to {transfer.target} and nobody reads it there")
        for name, places in self._schedule.replicas.items():
            for place in places:
                if not any((value, place, name) in self._read for value in self._nodes[name].outputs):
                    raise _BrokenError("replicas", f"{name} runs on {place} too and nobody reads there what it makes")

    def _storage(self, value: str) -> str:
        return self._storages.get(value, value)

    def _home_of(self, value: str) -> str:
        return self._home.setdefault(self._storage(value), self._first)

    def _version(self, value: str) -> str:
        """Return the node that produced a value's current version; empty if it is the version from before the graph."""
        position = max(self._made.get(value, -1), self._written.get(self._storage(value), -1))
        return "" if position < 0 else self._schedule.order[position]

    def _read_all(self, node: GraphNode, place: str) -> None:
        for value in node.inputs:
            if place != self._home_of(value):
                if place not in self._copies.get(value, ()):
                    raise _BrokenError("transfers", f"{node.id} reads {value} on {place}, where it is not, or no "
                                                    "longer as it is")
                self._read.add((value, place, self._version(value)))

    def _make(self, node: GraphNode, place: str, position: int) -> None:
        for value in node.outputs:
            if self._storage(value) == value:
                self._home[value] = place
        for value in node.outputs:
            self._made[value] = position
            if self._home_of(value) != place:
                raise _BrokenError("home", f"{node.id} makes {value} on {place}, a view of what is at home on "
                                           f"{self._home_of(value)}")

    def _write(self, node: GraphNode, place: str, position: int) -> None:
        for value in dict.fromkeys(node.writes):
            storage = self._storage(value)
            if self._home_of(value) != place:
                others = {other for other in node.inputs if self._storage(other) == storage and other != value}
                back = Transfer(value, place, self._home_of(value), node.id)
                if others or back not in self._due.get(node.id, ()):
                    raise _BrokenError("home", f"{node.id} writes {value} on {place}, which is at home on "
                                               f"{self._home_of(value)}, and does not write it back")
                self._away[value, node.id] = place
        for storage in dict.fromkeys(map(self._storage, node.writes)):
            self._written[storage] = position
            for copied in self._copied.pop(storage, ()):
                self._copies.pop(copied, None)
        for value in dict.fromkeys(node.writes):
            if self._home_of(value) != place:
                self._arrive(value, place)

    def _is_at(self, value: str, place: str) -> bool:
        return place == self._home_of(value) or place in self._copies.get(value, ())

    def _depart(self, transfer: Transfer) -> None:
        """Execute a transfer, or postpone it until the value arrives at its source."""
        value, target = transfer.value, transfer.target
        if self._away.get((value, transfer.after)) == transfer.source and target == self._home_of(value):
            return
        if not self._is_at(value, transfer.source):
            self._waiting.setdefault((value, transfer.source), []).append(transfer)
            return
        if self._is_at(value, target):
            raise _BrokenError("needless", f"{value} moves to {target} and is there already")
        self._read.add((value, transfer.source, transfer.after))
        self._arrive(value, target)

    def _arrive(self, value: str, place: str) -> None:
        arrivals = [(value, place)]
        while arrivals:
            value, place = arrivals.pop()
            self._copies.setdefault(value, set()).add(place)
            self._copied.setdefault(self._storage(value), set()).add(value)
            for transfer in self._waiting.pop((value, place), ()):
                if transfer.after != self._version(value):
                    raise _BrokenError("transfers", f"{value} has changed before it can move from {place}")
                if self._is_at(value, transfer.target):
                    raise _BrokenError("needless", f"{value} moves to {transfer.target} and is there already")
                self._read.add((value, place, transfer.after))
                arrivals.append((value, transfer.target))
