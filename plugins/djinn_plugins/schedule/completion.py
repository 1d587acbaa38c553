"""Turns a placement into a complete schedule: transfers, placements of values, order, times and cost."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_plugins.schedule.colocation import Homes, find_homes
from djinn_plugins.schedule.memory import peak_bytes
from djinn_plugins.schedule.order import arranged, ranks_of
from djinn_plugins.schedule.problem import NOWHERE, Problem
from djinn_plugins.schedule.schedule import CachingPolicy, CostEstimate, ExecutionSchedule, StepSpan, Transfer
from djinn_plugins.schedule.semantics import meaning_of
from djinn_plugins.schedule.timing import Simulation

_LONGEST_CHAIN = 8
_LARGE_BYTES = 1_000_000
_SHRINKING = 100


def complete(
    problem: Problem, placement: Sequence[int], order: Sequence[int] | None = None, *, scheduler: str = "",
    homes: Homes | None = None,
) -> ExecutionSchedule:
    """Create a schedule from the devices of nodes.

    Values move as rarely as possible, once to each device that reads them, and with as few bytes as possible: a view is
    recreated where its base is or will be anyway, and values that are cheaper to recompute than to move are recomputed.
    Values from outside that no device holds are placed where they are first read.

    Args:
        problem: The graph and its devices.
        placement: Device by node. Nodes that must be together go where the first of them is placed, or where their
            storage is held.
        order: Nodes in topological order; by default, ordered by priority and by the work that waits for them.
        scheduler: Name of the scheduler.
        homes: The nodes that must be together, if already known.

    Raises:
        ScheduleError: A node concerns storages that several devices hold, and can run nowhere.
    """
    homes = homes or find_homes(problem)
    place = settled(homes, placement)
    if order is None:
        order = arranged(problem, ranks_of(problem, place))
    return _Completion(problem, homes, place, order).finish(scheduler)


def settled(homes: Homes, placement: Sequence[int]) -> list[int]:
    """Place nodes that must be together where the first of them is placed, or where their storage is held."""
    return [placement[group] if homes.pinned[group] == NOWHERE else homes.pinned[group] for group in homes.group]


class _Completion(Simulation):
    """Simulates a schedule and records the transfers."""

    def __init__(self, problem: Problem, homes: Homes, place: Sequence[int], order: Sequence[int]) -> None:
        super().__init__(problem, homes, place)
        self._place = place
        self._order = order
        self._names = [device.id for device in problem.devices]
        self._transfers: dict[Transfer, StepSpan] = {}
        self._moved: set[tuple[int, int, int]] = set()
        """Value, target, and the node that produced the current version."""
        self._replicas: dict[int, list[int]] = {}
        self._positions = [0] * len(order)
        self._writer: dict[int, int] = {}
        """By storage: the last node that wrote to it."""
        self._demand: dict[tuple[int, int], list[int]] = {}
        """By storage and device: how many of its values are read there, and their bytes."""
        self._wanted: set[tuple[int, int]] = set()
        self._is_roomy = [room >= sum(problem.size) for room in problem.room()]
        self._compute_s = self._queueing_s = 0.0
        self._running = NOWHERE
        for position, node in enumerate(order):
            self._positions[node] = position
        if len(set(place)) > 1:
            self._count_demand()

    def _count_demand(self) -> None:
        problem = self.problem
        for node, reads in enumerate(problem.reads):
            device = self._place[node]
            for value in reads:
                if problem.maker[value] == NOWHERE or self._place[problem.maker[value]] != device:
                    key = (value, device)
                    if key not in self._wanted:
                        self._wanted.add(key)
                        demand = self._demand.setdefault((problem.root[value], device), [0, 0])
                        demand[0] += 1
                        demand[1] += problem.size[value]

    def finish(self, scheduler: str) -> ExecutionSchedule:
        """Simulate the schedule, and create it from the recorded data."""
        problem = self.problem
        nodes, order = problem.nodes, self._order
        spans = {}
        latency_s = 0.0
        for node in order:
            device = self._place[node]
            begin, end = self.run(node, device)
            spans[nodes[node].id] = StepSpan(begin, end)
            latency_s = max(latency_s, end)
            self._count(node, device)
            for value in problem.writes[node]:
                self._writer[problem.root[value]] = node
        estimate = self._estimate(latency_s)
        made = ExecutionSchedule(
            tuple(nodes[node].id for node in order),
            {nodes[node].id: self._names[self._place[node]] for node in order},
            tuple(self._transfers),
            scheduler=scheduler,
            replicas={nodes[node].id: tuple(self._names[device] for device in sorted(places))
                      for node, places in sorted(self._replicas.items())},
            placements={problem.values[value]: self._names[self.home[problem.root[value]]]
                        for value, maker in enumerate(problem.maker)
                        if maker == NOWHERE and problem.root[value] not in problem.held},
            caching=self._caching(),
            spans=spans,
            transfer_spans=dict(self._transfers),
            estimate=estimate,
            flags=self._flags(estimate),
            graph=problem.graph,
        )
        return attrs.evolve(made, budgets=peak_bytes(problem, made))

    def _count(self, node: int, device: int) -> None:
        seconds, load = self.problem.seconds(node, device), self.problem.devices[device].load
        self._compute_s += seconds * (1.0 - load)
        self._queueing_s += seconds * load

    def _version(self, value: int) -> int:
        """Return the node that produced a value's current version."""
        maker = self.problem.maker[value]
        writer = self._writer.get(self.problem.root[value], NOWHERE)
        if NOWHERE in {maker, writer}:
            return max(maker, writer)
        return maker if self._positions[maker] > self._positions[writer] else writer

    def bring(self, value: int, device: int) -> float:
        """Make a value available on a device, by recomputation there or by a transfer."""
        chain, bases = self._chain(value, device)
        if chain:
            problem = self.problem
            source = self.cheapest(value, device)[0]
            moving_s = problem.moving_s(value, source, device)
            again_s = sum(problem.seconds(node, device) for node in chain) + sum(
                0.0 if self._comes_anyway(base, device) else self._moving_s(base, device) for base in bases)
            if again_s < moving_s:
                for base in bases:
                    self._transfer(base, device)
                for node in chain:
                    self._repeat(node, device)
                return self.where[value][device]
        return self._transfer(value, device)

    def _moving_s(self, value: int, device: int) -> float:
        source = self.cheapest(value, device)[0]
        return self.problem.moving_s(value, source, device)

    def _comes_anyway(self, value: int, device: int) -> bool:
        if (value, device) in self._wanted:
            return True
        problem = self.problem
        count, size = self._demand.get((problem.root[value], device), (0, 0))
        return problem.root[value] == value and count > 1 and size >= problem.size[value]

    def _chain(self, value: int, device: int) -> tuple[list[int], list[int]]:
        """Find the nodes that could run on another device, too, so that a value need not move there.

        Returns:
            Nodes in execution order; and values that would have to move for them.
        """
        problem = self.problem
        chain: list[int] = []
        bases: list[int] = []
        todo = [value]
        while todo:
            wanted = todo.pop()
            if device in self.where[wanted]:
                continue
            node = problem.maker[wanted]
            if node in chain:
                continue
            if node != NOWHERE and len(chain) < _LONGEST_CHAIN and self._can_repeat(node, device):
                chain.append(node)
                todo += problem.reads[node]
            elif wanted not in bases:
                bases.append(wanted)
        if bases and not all(problem.is_view[node] for node in chain):
            return [], []
        return sorted(chain, key=self._positions.__getitem__), bases

    def _can_repeat(self, node: int, device: int) -> bool:
        """Return whether a node can be repeated on a device with the same result, and has not run there yet."""
        problem = self.problem
        if not problem.may_repeat[node]:
            return False
        for value in (*problem.reads[node], *problem.makes[node]):
            writer = self._writer.get(problem.root[value], NOWHERE)
            if writer != NOWHERE and self._positions[writer] > self._positions[node]:
                return False
        return device not in self._replicas.get(node, ()) and not any(
            (value, device, node) in self._moved for value in problem.makes[node])

    def _repeat(self, node: int, device: int) -> None:
        begin = self.free[device]
        for value in self.problem.reads[node]:
            begin = max(begin, self.where[value][device])
        end = self.free[device] = begin + self.problem.seconds(node, device)
        for value in self.problem.makes[node]:
            self.arrive(value, device, end)
        self._replicas.setdefault(node, []).append(device)
        self._count(node, device)

    def _transfer(self, value: int, device: int) -> float:
        source, begin, end = self.cheapest(value, device)
        if not self.problem.is_uniform:
            self._take_a_detour(value, source, device, end)
            source, begin, end = self.cheapest(value, device)
        return self.move(value, source, device, begin, end)

    def _take_a_detour(self, value: int, source: int, device: int, end: float) -> None:
        """Move a value to an intermediate device if it arrives earlier that way."""
        problem, width, at = self.problem, len(self.free), self.where[value]
        since = max(at[source], self._written.get(problem.root[value], 0.0))
        best, between = end, NOWHERE
        for other in range(width):
            if other != device and other not in at and self._is_roomy[other]:
                first, second = source * width + other, other * width + device
                there = max(since, self._links.get(first, 0.0)) + problem.moving_s(value, source, other)
                whole = max(there, self._links.get(second, 0.0)) + problem.moving_s(value, other, device)
                if whole < best:
                    best, between = whole, other
        if between != NOWHERE:
            begin = max(since, self._links.get(source * width + between, 0.0))
            self.move(value, source, between, begin, begin + problem.moving_s(value, source, between))

    def move(self, value: int, source: int, device: int, begin: float, end: float) -> float:
        """Record a transfer and execute it."""
        problem = self.problem
        after = self._version(value)
        if self.home[problem.root[value]] == device:
            # The value was written away from home and is sent back; the node that wrote it has just run.
            after = self._running
        self._moved.add((value, device, after))
        transfer = Transfer(problem.values[value], self._names[source], self._names[device],
                            "" if after == NOWHERE else problem.nodes[after].id, problem.size[value])
        self._transfers[transfer] = StepSpan(begin, end)
        return super().move(value, source, device, begin, end)

    def run(self, node: int, device: int) -> tuple[float, float]:
        """Run a node in the simulation."""
        self._running = node
        return super().run(node, device)

    def _caching(self) -> dict[str, CachingPolicy]:
        values = self.problem.values
        caching = {values[value]: CachingPolicy.PERSIST for value, lasts in enumerate(self.problem.outlives) if lasts}
        for node in self._replicas:
            for value in self.problem.makes[node]:
                caching.setdefault(values[value], CachingPolicy.RECOMPUTE)
        return caching

    def _estimate(self, latency_s: float) -> CostEstimate:
        problem = self.problem
        position = {name: index for index, name in enumerate(self._names)}
        is_measured = all(problem.devices[device].profile.is_measured for device in set(self._place)) and all(
            problem.links[position[moved.source]][position[moved.target]].is_measured for moved in self._transfers)
        transfer_s = sum(span.end_s - span.begin_s for span in self._transfers.values())
        return CostEstimate(
            latency_s, self._compute_s, transfer_s, self._queueing_s,
            transferred_bytes=sum(moved.size_bytes for moved in self._transfers),
            score=self._compute_s + transfer_s + self._queueing_s,
            is_measured=is_measured and bool(self._place))

    def _flags(self, estimate: CostEstimate) -> frozenset[str]:
        problem = self.problem
        flags = {f"phase:{known.execution_phase}" for known in map(meaning_of, problem.nodes) if known is not None}
        if len(set(self._place)) > 1:
            flags.add("split")
        if any(not problem.is_view[node] for node in self._replicas):
            flags.add("recomputes")
        if any(map(self._saves_the_network, range(len(problem.nodes)))):
            flags.add("reduction_remote")
        if self._place and not estimate.is_measured:
            flags.add("defaults")
        return frozenset(flags)

    def _saves_the_network(self, node: int) -> bool:
        """Return whether a node reduces its inputs to much less data, and runs where they are."""
        problem = self.problem
        if problem.is_view[node] or not problem.makes[node] or not problem.reads[node]:
            return False
        largest = max(problem.reads[node], key=problem.size.__getitem__)
        read, made = problem.size[largest], sum(problem.size[value] for value in problem.makes[node])
        return (read >= _LARGE_BYTES and read >= _SHRINKING * made
                and self.home[problem.root[largest]] == self._place[node])
