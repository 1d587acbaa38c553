"""List scheduling: node by node, each on the device where it completes first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from djinn_plugins.schedule.colocation import Homes
from djinn_plugins.schedule.memory_budget import Room
from djinn_plugins.schedule.order import arranged, ranks
from djinn_plugins.schedule.problem import NOWHERE, Problem
from djinn_plugins.schedule.timing import MOVING_WEIGHT, Simulation

_MANY_DEVICES = 8
_INSERTING_NODES = 4_000


def average_ranks(problem: Problem, homes: Homes) -> list[float]:
    """Rank nodes before devices are assigned, by the average cost of nodes and transfers."""
    kinds = problem.kinds_of_devices()
    sample = sorted(set(kinds))[:_MANY_DEVICES]
    share = [kinds.count(kind) for kind in sample]
    total = sum(share)
    columns = [problem.durations(kind) for kind in sample]
    if len(columns) == 1:
        seconds = columns[0]
    else:
        seconds = [sum(weight * took for weight, took in zip(share, row, strict=True)) / total
                   for row in zip(*columns, strict=True)]
    moving, group, maker = mean_moving(problem), homes.group, problem.maker
    return ranks(problem, seconds,
                 lambda value, node: 0.0 if group[maker[value]] == group[node] else moving[value])


def mean_moving(problem: Problem) -> list[float]:
    """Predict the cost of moving each value, averaged over all links."""
    width = len(problem.devices)
    if width == 1:
        return [0.0] * len(problem.size)
    lines = [problem.lines[source * width + target] for source in range(width) for target in range(width)
             if source != target]
    if problem.is_uniform:
        lines = lines[:1]
    latency_s = sum(line[0] for line in lines) / len(lines)
    byte_s = sum(line[1] for line in lines) / len(lines)
    return [latency_s + size * byte_s for size in problem.size]


def outlook(problem: Problem, homes: Homes) -> list[list[float]]:
    """Predict, for each node and device, the best remaining time after the node if it runs there.

    Source:
        Arabnejad and Barbosa, "List Scheduling Algorithm for Heterogeneous Systems by an Optimistic Cost Table", IEEE
        TPDS 25(3), 2014.
    """
    width = len(problem.devices)
    moving, group, pinned = mean_moving(problem), homes.group, homes.pinned
    columns = [problem.durations(device) for device in problem.kinds_of_devices()]
    found = [[0.0] * width for _ in problem.nodes]
    for node in range(len(found) - 1, -1, -1):
        own = found[node]
        through = [own[device] + columns[device][node] for device in range(width)]
        if pinned[group[node]] != NOWHERE:
            only = pinned[group[node]]
            through = [float("inf") if device != only else took for device, took in enumerate(through)]
        least = min(through)
        for value in problem.reads[node]:
            earlier = problem.maker[value]
            if earlier == NOWHERE:
                continue
            row = found[earlier]
            crossing = least + moving[value] if group[earlier] != group[node] else float("inf")
            for device in range(width):
                best = min(through[device], crossing)
                if best > row[device] and best != float("inf"):
                    row[device] = best
    return found


class ListPass(Simulation):
    """One pass over the nodes.

    Args:
        problem: The graph and its devices.
        homes: Groups of nodes that must be together.
        room: Memory of the devices.
        ahead: Remaining time after a node, by node and device; empty if only the node itself counts.
    """

    def __init__(self, problem: Problem, homes: Homes, room: Room, ahead: Sequence[Sequence[float]] = ()) -> None:
        self.place = [NOWHERE] * len(problem.nodes)
        super().__init__(problem, homes, self.place)
        self._groups = homes.members()
        self._room = room
        self._ahead = ahead
        self._moving = mean_moving(problem) if ahead else []
        self._begins = [0.0] * len(problem.nodes)
        self._ends = [0.0] * len(problem.nodes)
        self._floor = 0.0
        self._inserts = len(problem.nodes) <= _INSERTING_NODES
        self._busy: list[tuple[list[float], list[float]]] = [([], []) for _ in problem.devices]

    def follow(self, rank: Sequence[float]) -> list[int]:
        """Place every node; return the nodes by start time."""
        homes, place = self._homes, self.place
        for group, device in enumerate(homes.pinned):
            if device != NOWHERE:
                for member in self._groups.get(group, ()):
                    place[member] = device
        order = arranged(self.problem, rank)
        for node in order:
            # Gaps are filled, but not by a node that has to come after one that runs later.
            self._floor = max([self._ends[earlier] for earlier in self.problem.before[node]], default=0.0)
            if place[node] == NOWHERE:
                self._decide(node)
            self._append(node, place[node])
        position = {node: index for index, node in enumerate(order)}
        if self._inserts:
            order.sort(key=lambda node: (self._begins[node], position[node]))
        return order

    def _decide(self, node: int) -> None:
        group = self._homes.group[node]
        best, least = NOWHERE, float("inf")
        ahead = self._ahead[node] if self._ahead else None
        candidates = self._candidates(node, group)
        for device, ready in zip(candidates, self.ready(node, candidates, self._floor), strict=True):
            took = self.problem.seconds(node, device)
            score = took + (self._gap(device, ready, took) if self._inserts else max(ready, self.free[device]))
            if ahead is not None:
                score += ahead[device] + MOVING_WEIGHT * self._missing_s(node, device)
            if score < least:
                best, least = device, score
        if best == NOWHERE:
            best = self._room.roomiest()
        self._room.take(group, best)
        for member in self._groups[group]:
            self.place[member] = best

    def _missing_s(self, node: int, device: int) -> float:
        """Predict the transfer time of the values that a node reads and a device does not have."""
        return sum(self._moving[value] for value in self.problem.reads[node]
                   if self.where[value] and device not in self.where[value])

    def _candidates(self, node: int, group: int) -> Sequence[int]:
        """List devices to try: if weights or caches are already placed, only their devices."""
        problem, room = self.problem, self._room
        anchors = {self.home[problem.root[value]]: None for value in problem.reads[node]
                   if problem.stays[value] and problem.root[value] in self.home}
        found: Sequence[int] = [device for device in anchors if room.fits(group, device)]
        if found:
            return found
        width = len(self.free)
        found = range(width)
        if width > _MANY_DEVICES:
            near = {device: None for value in problem.reads[node] for device in list(self.where[value])[:2]}
            near.update(dict.fromkeys(self._idlest()))
            found = list(near)
        if not room.is_bounded:
            return found
        return [d for d in found if room.fits(group, d)] or [d for d in range(width) if room.fits(group, d)]

    def _idlest(self) -> list[int]:
        """Return some devices that are free early."""
        first = self.free.index(min(self.free))
        return [first, (first + 1) % len(self.free)]

    def _gap(self, device: int, ready: float, took: float) -> float:
        """Return when a device is free for that long."""
        begins, ends = self._busy[device]
        if not ends or ready >= ends[-1]:
            return ready
        begin = ready
        for index in range(bisect_right(ends, ready), len(ends)):
            if begin + took <= begins[index]:
                return begin
            begin = max(begin, ends[index])
        return begin

    def _append(self, node: int, device: int) -> None:
        """Run a node where it was placed, in the first gap that is long enough."""
        if not self._inserts:
            self._ends[node] = self.run(node, device)[1]
            return
        took = self.problem.seconds(node, device)
        begin = self._gap(device, self.gather(node, device, self._floor), took)
        end = begin + took
        self._begins[node], self._ends[node] = begin, end
        if took:
            begins, ends = self._busy[device]
            if not begins or begin >= begins[-1]:
                begins.append(begin)
                ends.append(end)
            else:
                index = bisect_right(begins, begin)
                begins.insert(index, begin)
                ends.insert(index, end)
        self.end(node, device, end)
