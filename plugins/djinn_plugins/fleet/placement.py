"""Placement: which of several executors holds an upload, and which runs an operation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import attrs
import torch

from djinn.errors import OutOfMemoryError
from djinn.ir.spec import TensorSpec
from djinn.ir.tape import Node
from djinn.kinds import Connection
from djinn.session.programs import lay_out
from djinn.wire.messages import Welcome
from djinn_plugins.common.memory.recently_used import RecentlyUsed
from djinn_plugins.fleet.loading import are_loads
from djinn_plugins.fleet.loads import FleetLoads
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.asking import scheduled
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.kinds import GraphScheduler
from djinn_plugins.schedule.placing import Placed, ValueDirectory
from djinn_plugins.schedule.profiles import identity_of, load
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, LinkProfile

log = logging.getLogger("djinn.placement")

MAX_SCHEDULES = 2048
"""Most pieces of tape whose schedules are cached."""
ROOM_FOR_ACTIVATIONS = 0.1
"""Fraction of a device's memory that uploads leave free."""
_LEVELS = 8
"""Number of levels of memory use; when a device reaches another level, pieces are scheduled again."""


class ExplicitPlacement:
    """Placement by the user: each executor is a separate device, ``remote_accelerator:0``, ``:1``, ..."""

    shares_generator = False

    def device_count(self, executors: int) -> int:
        """Return how many executors there are: each is a device."""
        return executors

    def devices(self, where: ValueDirectory, values: Sequence[int] = ()) -> list[DeviceInfo]:
        """Describe nothing: the user decides."""
        return []

    def house(self, size_bytes: int, device: torch.device | None, where: ValueDirectory) -> int:
        """Choose the executor that is the device."""
        return 0 if device is None else device.index or 0

    def place(self, nodes: Sequence[Node], gone: set[int], where: ValueDirectory) -> Placed:
        """Run each node on the device of its result, or of the tensor that it writes."""
        return [(node, _device_index(node)) for node in nodes]

    def pin(self, executor: int | None) -> None:
        """Do nothing: the user chooses the device."""

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Do nothing: speed does not influence this placement."""


def _device_index(node: Node) -> int:
    signature = node.signature
    specs: list[TensorSpec | None] = [signature.operands[index] for index in signature.writes]
    specs += [*signature.results, *signature.operands]
    return next((spec.device.index or 0 for spec in specs if spec is not None), 0)


@attrs.frozen
class FleetMember:
    """Known properties of one executor of a fleet."""

    id: str
    welcome: Welcome
    profile: DeviceProfile = attrs.field(factory=DeviceProfile)
    links: dict[str, LinkProfile] = attrs.field(factory=dict)
    home_link: LinkProfile = attrs.field(factory=LinkProfile)

    @property
    def memory_bytes(self) -> int | None:
        """Usable memory, if known."""
        return self.welcome.memory_bytes or None


def member_of(name: str, connection: Connection) -> FleetMember:
    """Describe an executor by its greeting and the stored measurements of its speed."""
    known = load(identity_of(connection))
    return FleetMember(name, connection.welcome, known.profile, home_link=known.home_link)


class JointPlacement:
    """What placements share for which all executors form one device.

    Args:
        members: The executors.
        annotate: Adds semantic annotations to a graph.
        loads: Knows how busy the executors are.
    """

    shares_generator = True

    def __init__(
        self, members: Sequence[FleetMember], annotate: Callable[[Graph], Graph], loads: FleetLoads,
    ) -> None:
        self._members = list(members)
        self._annotate = annotate
        self._loads = loads
        self._pinned: int | None = None

    def device_count(self, executors: int) -> int:
        """Return 1."""
        return 1

    def add(self, connection: Connection) -> None:
        """Place new work on another executor, too."""
        kind = self._members[0].id.partition(":")[0]
        self._members.append(member_of(f"{kind}:{len(self._members)}", connection))

    def pin(self, executor: int | None) -> None:
        """Run all further work on one executor; ``None``: where the placement chooses."""
        self._pinned = executor

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Record the measured speed of an executor and its links; later pieces are placed accordingly."""
        named = {self._members[index].id: link for index, link in links.items()}
        self._members[executor] = attrs.evolve(self._members[executor], profile=profile, home_link=home_link,
                                               links={**self._members[executor].links, **named})

    def _left(self, index: int, share: float, held_bytes: Sequence[int]) -> float:
        member = self._members[index]
        if member.memory_bytes is None:
            return math.inf
        return share * member.memory_bytes - held_bytes[index] - member.welcome.held_bytes

    def devices(self, where: ValueDirectory, values: Sequence[int] = ()) -> list[DeviceInfo]:
        """Describe the executors to a scheduler, in their order.

        Args:
            where: Where values are.
            values: Values whose location matters.
        """
        made = []
        for index, member in enumerate(self._members):
            held = [number for number in values if where.is_at(number, index)]
            at_home = frozenset(f"v{number}" for number in held if where.home_of(number) == index)
            made.append(DeviceInfo(
                member.id, member.memory_bytes, where.held_bytes[index] + member.welcome.held_bytes, at_home,
                frozenset(f"v{number}" for number in held) - at_home, member.profile, member.links, member.home_link,
                self._loads.of(index)))
        return made


class AutomaticPlacement(JointPlacement):
    """Placement by a scheduler: all executors form one device, and semantics, memory and speed decide.

    A piece of tape is scheduled once for each structure and each distribution of its inputs.

    Args:
        scheduler: Schedules operations.
        members: The executors.
        annotate: Adds semantic annotations to a graph.
        loads: Knows how busy the executors are.
    """

    def __init__(
        self, scheduler: GraphScheduler, members: Sequence[FleetMember], annotate: Callable[[Graph], Graph],
        loads: FleetLoads,
    ) -> None:
        super().__init__(members, annotate, loads)
        self._scheduler = scheduler
        self._schedules = RecentlyUsed[tuple[object, ...], tuple[tuple[int, ...], tuple[int, ...]]](MAX_SCHEDULES)
        self._ranked_by = self._load_levels()
        self._preference = self._ranked()
        self._filling = 0

    def add(self, connection: Connection) -> None:
        """Place new work on another executor, too. The next uploads stay with earlier ones as long as they fit."""
        self._preference.append(len(self._members))
        super().add(connection)

    def _ranked(self) -> list[int]:
        """List the less busy executors first."""
        return sorted(range(len(self._members)), key=lambda index: (
            self._ranked_by[index], self._members[index].welcome.sessions, self._members[index].welcome.held_bytes,
            index))

    def _load_levels(self) -> tuple[int, ...]:
        return tuple(self._loads.level_of(index) for index in range(len(self._members)))

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Record the measured speed of an executor and its links; later pieces are scheduled accordingly."""
        super().learn(executor, profile, home_link, links)
        self._schedules.clear()

    def house(self, size_bytes: int, device: torch.device | None, where: ValueDirectory) -> int:
        """Choose the executor that is being filled; once something does not fit there, the next.

        Small tensors that would still fit on an earlier executor stay with the tensors that they were uploaded with.

        Raises:
            OutOfMemoryError: No executor has room.
        """
        if self._pinned is not None:
            return self._pinned
        if not any(where.held_bytes) and self._ranked_by != (levels := self._load_levels()):
            # Later, a server is filled before the next one is used, so that values uploaded together stay together.
            self._ranked_by = levels
            self._preference, self._filling = self._ranked(), 0
        found = self._roomy(size_bytes, where.held_bytes)
        if found is not None:
            return found
        held = ", ".join(f"{where.held_bytes[index]:,} of {member.memory_bytes:,} bytes on {member.id}"
                         for index, member in enumerate(self._members))
        raise OutOfMemoryError(f"A tensor of {size_bytes:,} bytes fits none of the servers; in use are {held}.",
                               hint="Free tensors, add a server, or start servers with more memory (--memory-mib).")

    def _roomy(self, size_bytes: int, held_bytes: Sequence[int]) -> int | None:
        """Return the executor that is being filled, or the next one that has room."""
        for share in (1 - ROOM_FOR_ACTIVATIONS, 1.0):
            for place in chain(range(self._filling, len(self._preference)), range(self._filling)):
                index = self._preference[place]
                if size_bytes <= self._left(index, share, held_bytes):
                    self._filling = max(place, self._filling)
                    return index
        return None

    def _loaded(self, nodes: Sequence[Node], where: ValueDirectory) -> Placed:
        """Place operations that load stored tensors as if these were uploaded."""
        held_bytes, placed = list(where.held_bytes), []
        for node in nodes:
            size_bytes = sum(spec.size_bytes for spec in node.signature.results if spec is not None)
            index = self._roomy(size_bytes, held_bytes)
            if index is None:
                # A server may have room nevertheless: it maps files.
                index = max(self._preference, key=lambda each: self._left(each, 1.0, held_bytes))
            held_bytes[index] += size_bytes
            placed.append((node, index))
        return placed

    def place(self, nodes: Sequence[Node], gone: set[int], where: ValueDirectory) -> Placed:
        """Ask the scheduler, once per structure and distribution of the inputs."""
        if not nodes:
            return []
        if self._pinned is not None:
            return [(node, self._pinned) for node in nodes]
        if are_loads(nodes):
            return self._loaded(nodes, where)
        layout = lay_out(nodes, gone)
        spread = tuple(self._spread(number, where) for number in layout.inputs)
        key = (layout.key, spread, self._shapes(nodes), self._levels(where), self._load_levels())
        known = self._schedules.use(key, partial(self._decide, nodes, layout.inputs, where))
        return [(nodes[index], executor) for index, executor in zip(*known, strict=True)]

    @staticmethod
    def _spread(number: int, where: ValueDirectory) -> tuple[int, ...]:
        held = where.find(number)
        return () if held is None else (where.homes[held.storage], *sorted(held.copies))

    @staticmethod
    def _shapes(nodes: Sequence[Node]) -> int:
        """Distinguish pieces by the order of magnitude of their sizes, which determines the cost of transfers."""
        specs = (spec for node in nodes for spec in node.signature.results if spec is not None)
        return sum(spec.size_bytes for spec in specs).bit_length()

    def _levels(self, where: ValueDirectory) -> tuple[int, ...]:
        return tuple(0 if member.memory_bytes is None else _LEVELS * held // member.memory_bytes
                     for member, held in zip(self._members, where.held_bytes, strict=True))

    def _decide(
        self, nodes: Sequence[Node], inputs: Sequence[int], where: ValueDirectory
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        graph = self._annotate(graph_of(nodes))
        described = self.devices(where, inputs)
        devices = [described[index] for index in
                   (*self._preference[self._filling:], *self._preference[:self._filling])]
        schedule = scheduled(self._scheduler, graph, devices)
        # Whether it fits is for the servers to say: they map stored weights, and move to the host what is not in use.
        check_schedule(schedule, graph, [attrs.evolve(device, memory_bytes=None) for device in devices])
        indices = {member.id: index for index, member in enumerate(self._members)}
        positions = {node.id: index for index, node in enumerate(graph.nodes())}
        return (tuple(positions[name] for name in schedule.order),
                tuple(indices[schedule.devices[name]] for name in schedule.order))
