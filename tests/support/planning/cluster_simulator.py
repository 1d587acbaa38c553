"""A cluster that is not there: runs execution schedules event by event, on devices and links with given properties.

What is simulated: devices that do one thing at a time in the schedule's order; links with latency and bandwidth that
carry one transfer at a time, and uplinks that several links share fairly; the work of others as a queue M/M/1 ahead of
ours; memory by storages. What is not: kernels that slow each other down, caches, packets.

It knows nothing of how schedulers predict times, but for the cost of one node or one transfer by itself, which is given
from outside; so it can disagree with them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import attrs

from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.schedule.costs import CostModel
from djinn_plugins.schedule.profiling import Measurement
from djinn_plugins.schedule.schedule import (
    CachingPolicy,
    DeviceInfo,
    ExecutionSchedule,
    LinkProfile,
    StepSpan,
    Transfer,
)

Task = tuple[str, str]
"""A node and the device on which it runs: its own, or one of its replicas'."""
_USUAL_LINK = LinkProfile()


@attrs.frozen
class Cluster:
    """What work runs on."""

    devices: tuple[DeviceInfo, ...]
    uplinks: Mapping[str, float] = attrs.field(factory=dict)
    """Bytes per second that all transfers from and to a device share, fairly; what is missing has no limit of its
    own."""
    others_service_s: float = 1e-3
    """Mean time that a piece of other people's work takes, on devices with a load."""
    begin_s: Mapping[str, float] = attrs.field(factory=dict)
    """When a device is free for the first time."""

    def link(self, source: str, target: str) -> LinkProfile:
        """Return the properties of a link."""
        info = next((device for device in self.devices if device.id == source), None)
        return _USUAL_LINK if info is None else info.links.get(target, _USUAL_LINK)


@attrs.frozen
class SimulatedRun:
    """What happened."""

    makespan_s: float
    spans: Mapping[Task, StepSpan]
    """By node and device."""
    transfer_spans: Mapping[Transfer, StepSpan]
    """From when a transfer has the link to when all of it is there."""
    utilisation: Mapping[str, float]
    """Fraction of the makespan in which a device works for us."""
    waited_s: Mapping[str, float]
    """How long our work waited for that of others, by device."""
    link_bytes: Mapping[tuple[str, str], int]
    peak_bytes: Mapping[str, int]
    violations: tuple[str, ...]
    """What must not be: work whose operands are not there, more memory than there is, transfers of nothing."""


def simulate(
    schedule: ExecutionSchedule, cluster: Cluster, graph: Graph | None = None, *,
    node_seconds: Callable[[GraphNode, str], float] | None = None, seed: int = 0,
) -> SimulatedRun:
    """Run a schedule.

    Args:
        schedule: What to run.
        cluster: Where.
        graph: Of what; that of the schedule if not given.
        node_seconds: What a node takes on a device by itself; the kernel's cost model if not given.
        seed: Of the work of others.
    """
    whole = graph or schedule.graph
    assert whole is not None, "a schedule without its graph"
    return _Simulation(schedule, cluster, whole, node_seconds or CostModel(cluster.devices).node_seconds, seed).run()


class _Others:
    """The work of others on one device: arrives at random, is served first come first served, ours among it."""

    def __init__(self, load: float, service_s: float, seed: str) -> None:
        self._random = random.Random(seed)
        self._rate = load / service_s
        self._service_s = service_s
        # The queue has been there for long when we come.
        self._done_s = -300 * service_s / (1 - load)
        self._next_s = self._done_s + self._random.expovariate(self._rate) if self._rate else math.inf

    def backlog_until(self, now_s: float) -> float:
        """Say when what has arrived by now will be done."""
        while self._next_s <= now_s:
            self._done_s = max(self._done_s, self._next_s) + self._random.expovariate(1 / self._service_s)
            self._next_s += self._random.expovariate(self._rate)
        return self._done_s

    def occupied(self, until_s: float) -> None:
        """Learn that our own work holds the device: who comes meanwhile waits behind it."""
        self._done_s = max(self._done_s, until_s)


@attrs.define(eq=False)
class _Move:
    """A transfer on its way."""

    transfer: Transfer
    rest_bytes: float
    rate: float = 0.0
    since_s: float = 0.0
    version: int = 0
    """Of its rate: an end that was foretold for an earlier one does not hold."""
    begin_s: float = 0.0
    is_flowing: bool = False


class _Simulation:
    def __init__(
        self, schedule: ExecutionSchedule, cluster: Cluster, graph: Graph,
        node_seconds: Callable[[GraphNode, str], float], seed: int,
    ) -> None:
        self._schedule, self._cluster, self._graph = schedule, cluster, graph
        self._nodes = {node.id: node for node in graph.nodes()}
        self._seconds = node_seconds
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._spans: dict[Task, StepSpan] = {}
        self._transfer_spans: dict[Transfer, StepSpan] = {}
        self._bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._waited = dict.fromkeys((device.id for device in cluster.devices), 0.0)
        self._violations: list[str] = []
        self._others = {device.id: _Others(device.load, cluster.others_service_s, f"{seed}/{device.id}")
                        for device in cluster.devices}
        self._queues: dict[str, deque[str]] = {device.id: deque() for device in cluster.devices}
        self._line_up()
        self._free_s = {device.id: cluster.begin_s.get(device.id, 0.0) for device in cluster.devices}
        self._is_busy = dict.fromkeys(self._queues, False)
        self._memory = _Memory(schedule, graph, cluster)
        self._links: dict[tuple[str, str], deque[_Move]] = defaultdict(deque)
        self._flowing: dict[str, list[_Move]] = defaultdict(list)
        self._needs: dict[Task, int] = defaultdict(int)
        self._frees: dict[object, list[Task]] = defaultdict(list)
        self._starts: dict[object, list[Transfer]] = defaultdict(list)
        self._wire_up()

    def run(self) -> SimulatedRun:
        for transfer in self._starts.pop("", ()):
            self._request(0.0, transfer)
        for device in self._queues:
            self._try(self._free_s[device], device)
        while self._events:
            now_s, _, act = heapq.heappop(self._events)
            act(now_s)
        stuck = [f"{device} never ran {queue[0]}" for device, queue in self._queues.items() if queue]
        stuck += [f"{move.transfer.value} never left {source} for {target}"
                  for (source, target), moves in self._links.items() for move in moves]
        stuck += [f"{transfer.value} was never there to leave {transfer.source}"
                  for waiting in self._starts.values() for transfer in waiting]
        ends = [span.end_s for span in (*self._spans.values(), *self._transfer_spans.values())]
        makespan_s = max(ends, default=0.0)
        busy: dict[str, float] = dict.fromkeys(self._queues, 0.0)
        for (_, device), span in self._spans.items():
            busy[device] += span.end_s - span.begin_s
        return SimulatedRun(
            makespan_s, self._spans, self._transfer_spans,
            {device: time_s / makespan_s if makespan_s else 0.0 for device, time_s in busy.items()}, self._waited,
            dict(self._bytes), self._memory.peaks,
            (*self._violations, *self._memory.violations(), *stuck))

    def _line_up(self) -> None:
        """Give each device its nodes, in order; replicas run when the first node there needs what they make."""
        schedule = self._schedule
        waiting = {(value, device): node for node, places in schedule.replicas.items() for device in places
                   for value in self._nodes[node].outputs}
        for identifier in schedule.order:
            device = schedule.devices[identifier]
            todo = [identifier]
            while todo:
                inputs = self._nodes[todo[-1]].inputs
                needed = [waiting[value, device] for value in inputs if (value, device) in waiting]
                if needed and todo[-1] != needed[0]:
                    todo.append(needed[0])
                    continue
                done = todo.pop()
                for value in self._nodes[done].outputs:
                    waiting.pop((value, device), None)
                self._queues[device].append(done)
        for (_, device), node in waiting.items():
            if node not in self._queues[device]:
                self._queues[device].append(node)

    def _wire_up(self) -> None:
        """Find out what each task waits for: nodes on the same device, transfers that come there, random draws."""
        schedule, storages = self._schedule, self._graph.storages
        places = {node: (schedule.devices[node], *schedule.replicas.get(node, ())) for node in schedule.order}
        arriving = {(move.value, move.after, move.target): move for move in schedule.transfers}
        returning = {(storages.get(move.value, move.value), move.after, move.target): move
                     for move in schedule.transfers}
        versions = Versions(self._graph)
        last_draw = ""
        for node in map(self._nodes.__getitem__, schedule.order):
            for value in dict.fromkeys(node.inputs):
                version = versions.of(value)
                for device in places[node.id]:
                    move = arriving.get((value, version, device))
                    if move is None and version and device not in places[version]:
                        # Another value of the storage was written back to where both are at home.
                        move = returning.get((storages.get(value, value), version, device))
                    if move is not None:
                        self._wait((node.id, device), move)
                    elif version and device in places[version]:
                        self._wait((node.id, device), (version, device))
                    elif version or not self._memory.is_there(value, device):
                        self._violations.append(f"{node.id} on {device} reads {value}, which is not there")
            if node.is_random:
                if last_draw:
                    self._wait((node.id, places[node.id][0]), (last_draw, places[last_draw][0]))
                last_draw = node.id
            versions.ran(node)
        for move in schedule.transfers:
            onward = arriving.get((move.value, move.after, move.source))
            if onward is not None:
                self._starts[onward].append(move)
            elif not move.after:
                self._starts[""].append(move)
                if not self._memory.is_there(move.value, move.source):
                    self._violations.append(f"{move.value} leaves {move.source}, where it is not")
            elif move.source in places[move.after]:
                self._starts[move.after, move.source].append(move)
            else:
                self._violations.append(f"{move.value} leaves {move.source}, where {move.after} did not run")

    def _wait(self, task: Task, source: object) -> None:
        self._needs[task] += 1
        self._frees[source].append(task)

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, act))

    def _try(self, now_s: float, device: str) -> None:
        """Begin the next task of a device, if it is ready and the device is free."""
        queue = self._queues[device]
        if self._is_busy[device] or not queue or self._needs[queue[0], device]:
            return
        identifier = queue.popleft()
        self._is_busy[device] = True
        ready_s = max(now_s, self._free_s[device])
        self._begin(ready_s, device, identifier, ready_s)

    def _begin(self, now_s: float, device: str, identifier: str, ready_s: float) -> None:
        begin_s = max(now_s, self._others[device].backlog_until(now_s))
        self._waited[device] += begin_s - ready_s
        end_s = begin_s + self._seconds(self._nodes[identifier], device)
        self._others[device].occupied(end_s)
        self._spans[identifier, device] = StepSpan(begin_s, end_s)
        self._free_s[device] = end_s
        self._at(begin_s, lambda at_s: self._memory.begin(identifier, device))
        self._at(end_s, lambda at_s: self._end(at_s, identifier, device))

    def _end(self, now_s: float, identifier: str, device: str) -> None:
        self._is_busy[device] = False
        for transfer in self._starts.pop((identifier, device), ()):
            self._request(now_s, transfer)
        self._memory.end(identifier, device)
        self._release(now_s, (identifier, device))
        self._try(now_s, device)

    def _release(self, now_s: float, source: object) -> None:
        for task in self._frees.pop(source, ()):
            self._needs[task] -= 1
            if not self._needs[task]:
                self._try(now_s, task[1])

    def _request(self, now_s: float, transfer: Transfer) -> None:
        """Queue a transfer for its link."""
        moves = self._links[transfer.source, transfer.target]
        moves.append(_Move(transfer, float(transfer.size_bytes)))
        if len(moves) == 1:
            self._carry(now_s, moves[0])

    def _carry(self, now_s: float, move: _Move) -> None:
        """Give a transfer its link: first the latency, then the bytes flow."""
        transfer = move.transfer
        move.begin_s = now_s
        self._memory.arrive(transfer)
        self._at(now_s + self._cluster.link(transfer.source, transfer.target).latency_s,
                 lambda at_s: self._flow(at_s, move))

    def _flow(self, now_s: float, move: _Move) -> None:
        move.since_s, move.is_flowing = now_s, True
        ends = [end for end in (move.transfer.source, move.transfer.target) if end in self._cluster.uplinks]
        for end in ends:
            self._flowing[end].append(move)
        self._share(now_s, ends, move)

    def _share(self, now_s: float, uplinks: Sequence[str], *more: _Move) -> None:
        """Share uplinks anew among what flows over them, and foretell when each transfer ends."""
        for move in dict.fromkeys([*more, *(move for end in uplinks for move in self._flowing[end])]):
            transfer = move.transfer
            rate = self._cluster.link(transfer.source, transfer.target).bytes_per_s
            for end in (transfer.source, transfer.target):
                if end in self._cluster.uplinks:
                    rate = min(rate, self._cluster.uplinks[end] / len(self._flowing[end]))
            move.rest_bytes -= move.rate * (now_s - move.since_s)
            move.rate, move.since_s, move.version = rate, now_s, move.version + 1
            self._at(now_s + max(0.0, move.rest_bytes) / rate,
                     lambda at_s, move=move, version=move.version: self._ended(at_s, move, version))  # type: ignore[misc]

    def _ended(self, now_s: float, move: _Move, version: int) -> None:
        if version != move.version:
            return
        transfer = move.transfer
        link = transfer.source, transfer.target
        self._transfer_spans[transfer] = StepSpan(move.begin_s, now_s)
        self._bytes[link] += transfer.size_bytes
        ends = [end for end in link if end in self._cluster.uplinks]
        for end in ends:
            self._flowing[end].remove(move)
        self._share(now_s, ends)
        moves = self._links[link]
        moves.popleft()
        if moves:
            self._carry(now_s, moves[0])
        self._memory.let_go(transfer)
        for onward in self._starts.pop(transfer, ()):
            self._request(now_s, onward)
        self._release(now_s, transfer)


class Versions:
    """Which node made a value what it is, while a graph runs in order."""

    def __init__(self, graph: Graph) -> None:
        self._storages = graph.storages
        self._made: dict[str, tuple[int, str]] = {}
        self._written: dict[str, tuple[int, str]] = {}
        self._count = 0

    def of(self, value: str) -> str:
        """Name the node: its producer, or the last that wrote its storage; empty if it is as it was before."""
        nobody = (-1, "")
        return max(self._made.get(value, nobody), self._written.get(self._storages.get(value, value), nobody))[1]

    def ran(self, node: GraphNode) -> None:
        """Learn that a node ran."""
        entry = (self._count, node.id)
        self._count += 1
        self._made |= dict.fromkeys(node.outputs, entry)
        for value in node.writes:
            self._written[self._storages.get(value, value)] = entry


class _Memory:
    """What each device holds, by storages: at home the storage, elsewhere copies of values in it."""

    def __init__(self, schedule: ExecutionSchedule, graph: Graph, cluster: Cluster) -> None:
        self._storages = graph.storages
        self._nodes = {node.id: node for node in graph.nodes()}
        self._limits = {device.id: device.memory_bytes for device in cluster.devices}
        self._held = {device.id: device.held_bytes for device in cluster.devices}
        self._sizes: dict[str, int] = defaultdict(int)
        self._uses: dict[tuple[str, str], int] = defaultdict(int)
        """By storage and device: tasks and transfers that still need it there."""
        self._taken: dict[tuple[str, str], int] = {}
        """By storage and device: bytes that go when the last use is over."""
        self._home: dict[str, str] = {}
        self._there: set[tuple[str, str]] = set()
        made = {value for node in graph.nodes() for value in node.outputs}
        read = {value for node in graph.nodes() for value in node.inputs}
        self._made = {self._root(value) for value in made}
        self._stays = {self._root(value) for value in made - read}
        self._stays |= {self._root(value) for value, policy in schedule.caching.items()
                        if policy is CachingPolicy.PERSIST}
        self._measure(graph)
        self._place(schedule, cluster, read - made)
        self._count(schedule)
        self.peaks = dict(self._held)

    def _root(self, value: str) -> str:
        return self._storages.get(value, value)

    def _measure(self, graph: Graph) -> None:
        for node in graph.nodes():
            for value, spec in (*zip(node.outputs, node.specs, strict=False),
                                *zip(node.inputs, node.input_specs, strict=False)):
                if spec is not None:
                    root = self._root(value)
                    self._sizes[root] = max(self._sizes[root], spec.reach_bytes)

    def _place(self, schedule: ExecutionSchedule, cluster: Cluster, outside: set[str]) -> None:
        for device in cluster.devices:
            for value in outside & device.holds:
                self._home.setdefault(self._root(value), device.id)
            self._there.update((value, device.id) for value in device.copies)
        held = set(self._home)
        for value in sorted(outside):
            root = self._root(value)
            place = schedule.placements.get(value, cluster.devices[0].id if cluster.devices else "")
            if self._home.setdefault(root, place) == place and root not in held:
                held.add(root)
                self._held[place] += self._sizes[root]

    def _count(self, schedule: ExecutionSchedule) -> None:
        for identifier in schedule.order:
            node = self._nodes[identifier]
            touched = dict.fromkeys(self._root(value) for value in (*node.inputs, *node.outputs))
            for device in (schedule.devices[identifier], *schedule.replicas.get(identifier, ())):
                for root in touched:
                    self._uses[root, device] += 1
            for value in node.outputs:
                if self._root(value) == value:
                    self._home[value] = schedule.devices[identifier]
        for transfer in schedule.transfers:
            self._uses[self._root(transfer.value), transfer.source] += 1

    def is_there(self, value: str, device: str) -> bool:
        """Whether a value from outside is on a device before anything runs."""
        return self._home.get(self._root(value)) == device or (value, device) in self._there

    def begin(self, identifier: str, device: str) -> None:
        """A node begins: its results get room."""
        for value in self._nodes[identifier].outputs:
            if self._root(value) == value:
                self._take(value, device, self._sizes[value])

    def end(self, identifier: str, device: str) -> None:
        """A node has run."""
        node = self._nodes[identifier]
        for root in dict.fromkeys(self._root(value) for value in (*node.inputs, *node.outputs)):
            self._used(root, device)

    def arrive(self, transfer: Transfer) -> None:
        """A transfer begins: what comes gets room, unless it goes where the value is at home."""
        root = self._root(transfer.value)
        if self._home.get(root) != transfer.target:
            self._take(root, transfer.target, transfer.size_bytes)

    def let_go(self, transfer: Transfer) -> None:
        """A transfer is over."""
        self._used(self._root(transfer.value), transfer.source)

    def _take(self, root: str, device: str, size: int) -> None:
        self._taken[root, device] = self._taken.get((root, device), 0) + size
        self._held[device] += size
        self.peaks[device] = max(self.peaks[device], self._held[device])

    def _used(self, root: str, device: str) -> None:
        self._uses[root, device] -= 1
        if self._uses[root, device] or (root in self._stays and self._home.get(root) == device):
            return
        self._held[device] -= self._taken.pop((root, device), 0)

    def violations(self) -> list[str]:
        """Name the devices that had to hold more than they have."""
        return [f"{device} holds {self.peaks[device]} bytes and has {limit}" for device, limit in self._limits.items()
                if limit is not None and self.peaks[device] > limit]


def as_measured(schedule: ExecutionSchedule, measurement: Measurement) -> SimulatedRun:
    """Simulate a schedule with what its nodes and transfers really took, so that only the order of things is judged.

    Args:
        schedule: What was run.
        measurement: What `djinn_plugins.schedule.profiling.measure` found; pieces of several nodes are shared out
        evenly.
    """
    took_s = {node: (piece.span.end_s - piece.span.begin_s) / len(piece.nodes)
              for piece in measurement.pieces for node in piece.nodes}
    moves: dict[tuple[str, str], list[float]] = defaultdict(list)
    for move in measurement.transfers:
        moves[move.source, move.target].append(move.span.end_s - move.span.begin_s)
    devices = tuple(attrs.evolve(info, load=0.0, links={
        target: LinkProfile(sum(times) / len(times), math.inf) for (source, target), times in moves.items()
        if source == info.id}) for info in schedule.device_infos)
    return simulate(schedule, Cluster(devices), node_seconds=lambda node, _: took_s[node.id])
