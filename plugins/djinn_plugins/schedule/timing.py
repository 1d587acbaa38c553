"""Simulates a schedule to predict when each step happens, without running anything."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_plugins.schedule.colocation import Homes
from djinn_plugins.schedule.problem import NOWHERE, Problem

MOVING_WEIGHT = 0.01
"""Cost of a second of transfers in addition to the time that work waits for them: of two equally fast plans, the one
that moves less is better.
"""
_NEVER = float("inf")
_GENERATOR_BYTES = 5056
"""Size of the state of PyTorch's CPU generator, the largest one."""


class Simulation:
    """Simulates nodes one after the other, each as early as possible.

    A device runs one node at a time, in the order of the calls. A link carries one value at a time, in the order in
    which nodes need them, and a value is sent as soon as it is created. A value from outside that no device holds is
    placed where it is first read.

    Args:
        problem: The graph and its devices.
        homes: The nodes that must be together.
        place: Device by node, `NOWHERE` if not decided yet; read when a storage of a group first occurs.
    """

    def __init__(self, problem: Problem, homes: Homes, place: Sequence[int]) -> None:
        self.problem = problem
        self._homes = homes
        self._place = place
        self.free = [0.0] * len(problem.devices)
        """When each device has finished its work so far."""
        self.home = dict(problem.held)
        """By storage: its home device."""
        self.moved_s = 0.0
        """Total time that values spent on links."""
        self.where: list[dict[int, float]] = [{} for _ in problem.values]
        """By value: the devices that have its current version, including its home, and since when."""
        self._links: dict[int, float] = {}
        self._written: dict[int, float] = {}
        self._returned: dict[int, float] = {}
        self._copied: dict[int, list[int]] = {}
        self._drawn = (NOWHERE, 0.0)
        for value, maker in enumerate(problem.maker):
            if maker == NOWHERE and problem.root[value] in self.home:
                self.locate(value, NOWHERE)

    def copy(self, place: Sequence[int]) -> Simulation:
        """Copy the current state; the copy continues with its own placement."""
        made = object.__new__(Simulation)
        made.problem, made._homes, made._place = self.problem, self._homes, place
        made.free, made.home, made.where = self.free.copy(), self.home.copy(), [at.copy() for at in self.where]
        made._links, made._written, made._returned = self._links.copy(), self._written.copy(), self._returned.copy()
        made._copied = {storage: values.copy() for storage, values in self._copied.items()}
        made._drawn, made.moved_s = self._drawn, self.moved_s
        return made

    def locate(self, value: int, device: int) -> None:
        """Make sure that a value from outside has a location, when a node on ``device`` is the first to read it."""
        storage = self.problem.root[value]
        if storage not in self.home:
            group = self._homes.storages.get(storage, NOWHERE)
            settled = self._place[group] if group != NOWHERE else NOWHERE
            self.home[storage] = device if settled == NOWHERE else settled
        at = self.where[value]
        if storage not in self._written:
            for other in self.problem.copies.get(value, ()):
                at[other] = 0.0
                self._copied.setdefault(storage, []).append(value)
        at[self.home[storage]] = 0.0

    def ready(self, node: int, devices: Sequence[int], begin: float = 0.0) -> list[float]:
        """Return when a node's inputs could be available on each of some devices; changes nothing."""
        problem, lines, links, width = self.problem, self.problem.lines, self._links, len(self.free)
        found = [begin] * len(devices)
        for value in problem.reads[node]:
            storage = problem.root[value]
            home = self.home.get(storage, NOWHERE)
            at = self.where[value] or ({home: 0.0} if home != NOWHERE else {})
            if not at:
                continue
            size = problem.size[value]
            written = self._written.get(storage, 0.0) if self._written else 0.0
            for index, device in enumerate(devices):
                since = at.get(device)
                if since is None:
                    since = _NEVER
                    for source, there in at.items():
                        line = source * width + device
                        leaves = written if written > there and source == home else there
                        if line in links and links[line] > leaves:
                            leaves = links[line]
                        latency_s, byte_s = lines[line]
                        comes = leaves + latency_s + size * byte_s
                        since = min(since, comes)
                elif self._returned and device == home:
                    since = max(since, self._returned.get(storage, 0.0))
                found[index] = max(found[index], since)
        return found

    def cheapest(self, value: int, device: int) -> tuple[int, float, float]:
        """Find the device from which a value arrives earliest.

        Returns:
            The device, the departure time, and the arrival time.
        """
        problem, width = self.problem, len(self.free)
        size, storage = problem.size[value], problem.root[value]
        home, written = self.home[storage], self._written.get(storage, 0.0)
        best, departs, comes = NOWHERE, 0.0, _NEVER
        for source, since in self.where[value].items():
            line = source * width + device
            busy_until = self._links.get(line, 0.0)
            begin = max(busy_until, since)
            if source == home and written > begin:
                begin = written
            latency_s, byte_s = problem.lines[line]
            end = begin + latency_s + size * byte_s
            if end < comes:
                best, departs, comes = source, begin, end
        return best, departs, comes

    def bring(self, value: int, device: int) -> float:
        """Move a value to a device that does not have it; return when it arrives."""
        source, begin, end = self.cheapest(value, device)
        return self.move(value, source, device, begin, end)

    def move(self, value: int, source: int, device: int, begin: float, end: float) -> float:
        """Execute a transfer."""
        self.moved_s += end - begin
        self._links[source * len(self.free) + device] = end
        self.arrive(value, device, end)
        return end

    def arrive(self, value: int, device: int, when: float) -> None:
        """Record that a device has a copy of a value."""
        self.where[value][device] = when
        self._copied.setdefault(self.problem.root[value], []).append(value)

    def run(self, node: int, device: int) -> tuple[float, float]:
        """Run a node on a device; return when it begins and ends."""
        ready = self.gather(node, device, self.free[device])
        end = ready + self.problem.seconds(node, device)
        self.end(node, device, end)
        return ready, end

    def gather(self, node: int, device: int, ready: float) -> float:
        """Move a node's inputs to a device; return when all are there and the device is ready."""
        problem, where = self.problem, self.where
        for value in problem.reads[node]:
            at = where[value]
            if not at:
                self.locate(value, device)
            since = at.get(device)
            if since is None:
                since = self.bring(value, device)
            ready = max(ready, since)
            if self._returned and self.home[problem.root[value]] == device:
                ready = max(ready, self._returned.get(problem.root[value], 0.0))
        if problem.is_random[node]:
            source, since = self._drawn
            if source not in {NOWHERE, device}:
                # The generator's state moves from each draw to the next.
                since += problem.links[source][device].seconds(_GENERATOR_BYTES)
            ready = max(ready, since)
        return ready

    def end(self, node: int, device: int, end: float) -> None:
        """Record that a node has finished."""
        problem = self.problem
        self.free[device] = end
        if problem.is_random[node]:
            self._drawn = (device, end)
        for value in problem.makes[node]:
            self.where[value] = {device: end}
            if problem.root[value] == value:
                self.home[value] = device
        if problem.writes[node]:
            self._write(node, device, end)

    def _write(self, node: int, device: int, end: float) -> None:
        root = self.problem.root
        for storage in {root[value] for value in self.problem.writes[node]}:
            home = self.home[storage]
            for value in self._copied.pop(storage, ()):
                since = self.where[value].get(home)
                self.where[value] = {} if since is None else {home: since}
            self._written[storage] = end
        for value in self._homes.away.get(node, ()):
            storage = root[value]
            home = self.home[storage]
            begin = max(end, self._links.get(device * len(self.free) + home, 0.0))
            back = begin + self.problem.moving_s(value, device, home)
            self._written[storage] = self._returned[storage] = back
            self.move(value, device, home, begin, back)
            self.arrive(value, device, end)


def makespan(problem: Problem, homes: Homes, place: Sequence[int], order: Sequence[int]) -> float:
    """Predict how long nodes take in this order on these devices, plus a small penalty for transfers."""
    rehearsal = Simulation(problem, homes, place)
    run = rehearsal.run
    last = 0.0
    for node in order:
        last = max(last, run(node, place[node])[1])
    return last + MOVING_WEIGHT * rehearsal.moved_s
