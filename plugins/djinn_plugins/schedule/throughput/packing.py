"""Packing: distributes pieces of work over devices so that the load of the busiest one is minimal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from djinn_plugins.schedule.colocation import Homes
from djinn_plugins.schedule.memory_budget import Room
from djinn_plugins.schedule.problem import NOWHERE, Problem


@attrs.frozen
class WeightGroup:
    """Groups of nodes that share weights, and therefore stay together."""

    groups: tuple[int, ...]
    nodes: tuple[int, ...]
    pinned: int
    """The device that holds the piece's values, or `NOWHERE`."""


def pieces_of(problem: Problem, homes: Homes, room: Room) -> list[WeightGroup]:
    """Find the pieces: nodes that read the same weights or caches form one, if one device has enough memory for it.

    Pieces are in the order of their first nodes.
    """
    members = homes.members()
    leader = {group: group for group in members}
    device = {group: homes.pinned[group] for group in members}

    def lead(group: int) -> int:
        while leader[group] != group:
            leader[group] = leader[leader[group]]
            group = leader[group]
        return group

    first: dict[int, int] = {}
    for node, group in enumerate(homes.group):
        for value in problem.reads[node]:
            storage = problem.root[value]
            if not problem.stays[value] or storage in problem.held:
                continue
            one, other = lead(first.setdefault(storage, group)), lead(group)
            if one != other and NOWHERE in {device[one], device[other]}:
                low, high = min(one, other), max(one, other)
                leader[high], device[low] = low, max(device[low], device[high])
    together: dict[int, list[int]] = {}
    for group in members:
        together.setdefault(lead(group), []).append(group)
    widest = range(len(problem.devices))
    found = []
    for top, groups in together.items():
        whole = WeightGroup(tuple(groups), tuple(node for group in groups for node in members[group]), device[top])
        if any(room.fits_all(whole.groups, index) for index in widest):
            found.append(whole)
        else:
            found += [WeightGroup((group,), tuple(members[group]), homes.pinned[group]) for group in groups]
    return found


@attrs.frozen
class Packing:
    """A placement of nodes, and the load of the busiest part."""

    place: Sequence[int]
    busiest_s: float
    """Time per run of the graph on the busiest device or link."""
    moved_bytes: int


def packed(problem: Problem, place: Sequence[int]) -> Packing:
    """Compute the load of devices and links."""
    devices = [0.0] * len(problem.devices)
    links: dict[int, float] = {}
    moved: set[tuple[int, int]] = set()
    home = dict(problem.held)
    total = 0
    width = len(devices)
    for node, device in enumerate(place):
        devices[device] += problem.seconds(node, device)
        for value in problem.makes[node]:
            home.setdefault(problem.root[value], device)
        for value in problem.reads[node]:
            source = home.setdefault(problem.root[value], device)
            if source != device and (value, device) not in moved and device not in problem.copies.get(value, ()):
                moved.add((value, device))
                total += problem.size[value]
                line = source * width + device
                links[line] = links.get(line, 0.0) + problem.moving_s(value, source, device)
    return Packing(place, max(*devices, *links.values(), 0.0), total)


class Packer:
    """Distributes pieces over devices.

    Args:
        problem: The graph and its devices.
        homes: Groups of nodes that must be together.
        is_strict: Whether to reserve memory for all values that nodes make, as if none were ever freed.
    """

    def __init__(self, problem: Problem, homes: Homes, *, is_strict: bool) -> None:
        self._problem = problem
        self._homes = homes
        self._is_strict = is_strict
        self.pieces = pieces_of(problem, homes, self._room())
        self._fastest = [min(problem.seconds(node, device) for device in sorted(set(problem.kinds_of_devices())))
                         for node in range(len(problem.nodes))]

    def _room(self) -> Room:
        return Room(self._problem, self._homes, is_strict=self._is_strict)

    def ways(self) -> Iterator[Packing]:
        """Yield packings by several methods."""
        width = len(self._problem.devices)
        for count in range(1, min(width, 8) + 1):
            yield self._in_a_row(count)
        if width > 8:
            yield self._in_a_row(width)
        yield self._largest_first()

    def _in_a_row(self, count: int) -> Packing:
        """Cut program order into one part per device, with lengths proportional to the devices' speeds."""
        problem = self._problem
        place, room, load = self._begun()
        speeds = [1.0 / max(sum(problem.seconds(node, device) for node in range(0, len(place), 1 + len(place) // 64)),
                            1e-12) for device in range(len(load))]
        chosen = sorted(sorted(range(len(load)), key=lambda device: (-speeds[device], device))[:count])
        whole = sum(self._fastest) / sum(speeds[device] for device in chosen)
        at = 0
        for piece in self._free():
            while at < len(chosen) - 1 and load[chosen[at]] >= whole * max(speeds):
                at += 1
            order = [*chosen[at:], *chosen[:at], *range(len(load))]
            self._put(piece, next((d for d in order if room.fits_all(piece.groups, d)), room.roomiest()),
                      place, room, load)
        return packed(problem, place)

    def _largest_first(self) -> Packing:
        """Assign the longest remaining piece to the device that completes it first.

        Source:
            Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17(2), 1969: longest processing
            time first.
        """
        problem = self._problem
        place, room, load = self._begun()
        weight = {piece.groups: sum(self._fastest[node] for node in piece.nodes) for piece in self.pieces}
        kinds = problem.kinds_of_devices()
        for piece in sorted(self._free(), key=lambda piece: (-weight[piece.groups], piece.nodes[0])):
            took = {kind: sum(problem.seconds(node, kind) for node in piece.nodes) for kind in set(kinds)}
            fitting = [device for device in range(len(load)) if room.fits_all(piece.groups, device)]
            best = min(fitting or [room.roomiest()], key=lambda device: (load[device] + took[kinds[device]], device))
            self._put(piece, best, place, room, load)
        return packed(problem, place)

    def _begun(self) -> tuple[list[int], Room, list[float]]:
        """Start with the pinned pieces."""
        place, room, load = [0] * len(self._problem.nodes), self._room(), [0.0] * len(self._problem.devices)
        for piece in self.pieces:
            if piece.pinned != NOWHERE:
                self._put(piece, piece.pinned, place, room, load)
        return place, room, load

    def _free(self) -> Iterable[WeightGroup]:
        return (piece for piece in self.pieces if piece.pinned == NOWHERE)

    def _put(self, piece: WeightGroup, device: int, place: list[int], room: Room, load: list[float]) -> None:
        for group in piece.groups:
            room.take(group, device)
        for node in piece.nodes:
            place[node] = device
            load[device] += self._problem.seconds(node, device)

    def improved(self, packing: Packing, effort: int) -> Packing:
        """Move pieces one by one while that reduces the load of the busiest part."""
        loose = [piece for piece in self.pieces if piece.pinned == NOWHERE]
        moves = [(piece, device) for piece in loose for device in range(len(self._problem.devices))]
        at = failed = 0
        while moves and failed < len(moves) and effort > 0:
            piece, device = moves[at % len(moves)]
            at, failed = at + 1, failed + 1
            if packing.place[piece.nodes[0]] == device:
                continue
            effort -= len(packing.place)
            place = list(packing.place)
            for node in piece.nodes:
                place[node] = device
            found = packed(self._problem, place)
            if better(found, packing) and self._is_roomy(place):
                packing, failed = found, 0
        return packing

    def _is_roomy(self, place: Sequence[int]) -> bool:
        room = self._room()
        for piece in self.pieces:
            for group in piece.groups:
                if not room.fits(group, place[piece.nodes[0]]):
                    return False
                room.take(group, place[piece.nodes[0]])
        return True


def better(one: Packing, other: Packing) -> bool:
    """Whether a packing is better: a lower maximum load, or the same with fewer transfers."""
    if abs(one.busiest_s - other.busiest_s) > 1e-9 * other.busiest_s:
        return one.busiest_s < other.busiest_s
    return one.moved_bytes < other.moved_bytes
