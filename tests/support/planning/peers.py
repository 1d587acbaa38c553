"""What schedulers are measured against: the optimum, by trying everything, and HEFT, as it is published."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence

from support.planning.graphs import seconds

from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule


class Numbers:
    """A graph without writes by numbers, each node with one result; values from outside are held by somebody."""

    def __init__(self, graph: Graph, devices: Sequence[DeviceInfo]) -> None:
        self.nodes = list(graph.nodes())
        self.devices = list(devices)
        index = {node.outputs[0]: number for number, node in enumerate(self.nodes)}
        names = [device.id for device in devices]
        self.took = [[seconds(node, device) for device in devices] for node in self.nodes]
        known = [pair for node in self.nodes for pair in (*zip(node.inputs, node.input_specs, strict=True),
                                                          *zip(node.outputs, node.specs, strict=True))]
        sizes = {name: spec.size_bytes for name, spec in known if spec is not None}
        outside = sorted({value for node in self.nodes for value in node.inputs} - set(index))
        index.update({value: len(self.nodes) + number for number, value in enumerate(outside)})
        self.reads = [[index[value] for value in dict.fromkeys(node.inputs)] for node in self.nodes]
        self.at = {index[value]: names.index(device.id) for device in devices for value in device.holds
                   if value in index}
        self.size = {index[value]: size for value, size in sizes.items()}
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        for node, reads in enumerate(self.reads):
            for value in reads:
                if value < len(self.nodes):
                    self.readers[value].append(node)
        self.links = [[None if a is b else a.links[b.id] for b in devices] for a in devices]

    def moving(self, value: int, source: int, target: int) -> float:
        return 0.0 if source == target else self.links[source][target].seconds(self.size[value])


def optimum(graph: Graph, devices: Sequence[DeviceInfo], bound: float) -> tuple[float, int]:
    """Find the shortest time of all placements and orders, if it is below ``bound``; and the number of steps taken.

    Nodes come in the order in which they begin: a link serves one device, whose nodes begin in their order, so no
    schedule is left out.
    """
    n = Numbers(graph, devices)
    width, count = len(devices), len(n.nodes)
    least = [min(row) for row in n.took]
    tail = [0.0] * count
    for node in range(count - 1, -1, -1):
        tail[node] = max((least[later] + tail[later] for later in n.readers[node]), default=0.0)
    best, steps = bound * (1 - 1e-9), 0
    where: list[dict[int, float]] = [{} for _ in range(count)] + [{n.at[value]: 0.0} for value in sorted(n.at)]
    missing = [sum(value < count for value in reads) for reads in n.reads]
    free, links = [0.0] * width, [0.0] * (width * width)
    placed = [False] * count

    def go(done: int, begun: float, ended: float, left: float) -> None:
        nonlocal best, steps
        if done == count:
            best = min(best, ended)
            return
        choices = []
        for node in range(count):
            if placed[node] or missing[node]:
                continue
            for device in range(width):
                begin = free[device]
                for value in n.reads[node]:
                    at = where[value]
                    begin = max(begin, at[device] if device in at else min(
                        max(since, links[source * width + device]) + n.moving(value, source, device)
                        for source, since in at.items()))
                end = begin + n.took[node][device]
                if begin >= begun and end + tail[node] < best and (
                        sum(free) - free[device] + end + left - least[node] < best * width):
                    choices.append((end + tail[node], node, device))
        for soonest, node, device in sorted(choices):
            if soonest >= best:
                break
            steps += 1
            kept, came, begin = links.copy(), [], free[device]
            for value in n.reads[node]:
                at = where[value]
                if device not in at:
                    comes, source = min((max(since, links[s * width + device]) + n.moving(value, s, device), s)
                                        for s, since in at.items())
                    at[device] = links[source * width + device] = comes
                    came.append(value)
                begin = max(begin, at[device])
            was, free[device] = free[device], begin + n.took[node][device]
            where[node] = {device: free[device]}
            placed[node] = True
            for later in n.readers[node]:
                missing[later] -= 1
            if begin >= begun and free[device] + tail[node] < best:
                go(done + 1, begin, max(ended, free[device]), left - least[node])
            for later in n.readers[node]:
                missing[later] += 1
            placed[node], free[device], links[:] = False, was, kept
            for value in came:
                del where[value][device]
            where[node] = {}

    go(0, 0.0, 0.0, sum(least))
    return (bound if best == bound * (1 - 1e-9) else best), steps


def heft(graph: Graph, devices: Sequence[DeviceInfo]) -> float:
    """Schedule by HEFT with insertion, and say how long that takes where links carry one value at a time.

    Source:
        Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002. Values from outside are read where they are held.
    """
    n = Numbers(graph, devices)
    width, count = len(devices), len(n.nodes)
    pairs = [(a, b) for a in range(width) for b in range(width) if a != b]
    rank = [0.0] * count
    for node in range(count - 1, -1, -1):
        mean = sum(n.moving(node, a, b) for a, b in pairs) / len(pairs)
        rank[node] = sum(n.took[node]) / width + max((mean + rank[later] for later in n.readers[node]), default=0.0)
    busy: list[list[tuple[float, float]]] = [[] for _ in devices]
    place, begins, ends = [0] * count, [0.0] * count, [0.0] * count
    for node in sorted(range(count), key=lambda node: (-rank[node], node)):
        found = []
        for device in range(width):
            ready = max((n.moving(value, n.at[value], device) if value >= count else
                         ends[value] + n.moving(value, place[value], device) for value in n.reads[node]), default=0.0)
            begin = ready
            for start, end in busy[device]:
                if begin + n.took[node][device] <= start:
                    break
                begin = max(begin, end)
            found.append((begin + n.took[node][device], device, begin))
        ends[node], place[node], begins[node] = min(found)
        insort(busy[place[node]], (begins[node], ends[node]))
    order = sorted(range(count), key=lambda node: (begins[node], -rank[node]))
    names = [node.id for node in n.nodes]
    schedule = ExecutionSchedule(tuple(names[node] for node in order),
                                 {names[node]: devices[place[node]].id for node in order})
    return simulated(n, schedule)


def simulated(n: Numbers, schedule: ExecutionSchedule) -> float:
    """Say when the last node ends: devices and links do one thing at a time, in the order in which it is needed."""
    count, width = len(n.nodes), len(n.devices)
    number = {node.id: index for index, node in enumerate(n.nodes)}
    device_of: Mapping[str, int] = {device.id: index for index, device in enumerate(n.devices)}
    free, links = [0.0] * width, [0.0] * (width * width)
    where: list[dict[int, float]] = [{} for _ in range(count)] + [{n.at[value]: 0.0} for value in sorted(n.at)]
    for name in schedule.order:
        node, device = number[name], device_of[schedule.devices[name]]
        begin = free[device]
        for value in n.reads[node]:
            at = where[value]
            if device not in at:
                comes, source = min((max(since, links[s * width + device]) + n.moving(value, s, device), s)
                                    for s, since in at.items())
                at[device] = links[source * width + device] = comes
            begin = max(begin, at[device])
        free[device] = begin + n.took[node][device]
        where[node] = {device: free[device]}
    return max(free)
