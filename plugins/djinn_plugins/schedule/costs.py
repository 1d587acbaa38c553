"""The cost of work, transfers and waiting, in seconds; `docs/planning.md` has the formulae."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from djinn_plugins.graph.graph import Graph, GraphNode
from djinn_plugins.graph.metadata import MemoryPattern
from djinn_plugins.schedule.schedule import CostEstimate, DeviceInfo, ExecutionSchedule, LinkProfile, StepSpan, Transfer
from djinn_plugins.schedule.semantics import meaning_of

__all__ = ("CostModel", "CostWeights", "waiting_s", "weighted")


@attrs.frozen
class CostWeights:
    """The weight of a second of each kind in `CostEstimate.score`. All weights are equal by default."""

    alpha: float = 1.0
    """Weight of computing."""
    beta: float = 1.0
    """Weight of moving values. More than ``alpha`` if the network is shared with others."""
    gamma: float = 1.0
    """Weight of waiting for other sessions' work. More than ``alpha`` if latency matters."""


def waiting_s(service_s: float, load: float) -> float:
    """Predict how long work waits for other sessions' work.

    Args:
        service_s: How long the work takes on an idle device.
        load: Fraction of the time in which the device is busy with other work, from 0 to below 1.

    Raises:
        ValueError: With that load, the queue grows without limit.

    Source:
        The queue M/M/1: Kleinrock, "Queueing Systems", volume 1, 1975, section 3.2.
    """
    if not 0 <= load < 1:
        raise ValueError(f"A load is from 0 to below 1, not {load}.")
    return load / (1 - load) * service_s


def weighted(devices: Sequence[DeviceInfo], weights: CostWeights) -> list[DeviceInfo]:
    """Describe devices so that a scheduler which minimizes time minimizes weighted time.

    Only the relation of weights matters to a scheduler. Links are slower by ``beta / alpha``, and waiting for other
    sessions takes longer by ``gamma / alpha``; computing takes as long as it does.

    Raises:
        ValueError: A weight is negative, or ``alpha`` is zero.
    """
    if weights.alpha <= 0 or min(weights.beta, weights.gamma) < 0:
        raise ValueError(f"alpha is above zero, and beta and gamma are zero or above, not {weights}.")
    moving, waiting = weights.beta / weights.alpha, weights.gamma / weights.alpha

    def slower(link: LinkProfile) -> LinkProfile:
        return attrs.evolve(link, latency_s=link.latency_s * moving,
                            bytes_per_s=link.bytes_per_s / moving if moving else math.inf)

    made = []
    for device in devices:
        waited = waiting_s(waiting, device.load)
        links = {other.id: slower(device.links.get(other.id, _USUAL_LINK)) for other in devices if other is not device}
        made.append(attrs.evolve(device, links=links, load=waited / (1 + waited)))
    return made


class CostModel:
    """Predicts the cost of a schedule.

    Args:
        devices: Descriptions of the devices.
        weights: Weights of the parts of the score.

    Concurrency:
        Any thread, one at a time.
    """

    def __init__(self, devices: Sequence[DeviceInfo], weights: CostWeights | None = None) -> None:
        self.weights = weights or CostWeights()
        self._devices = {device.id: device for device in devices}
        self._first = devices[0] if devices else DeviceInfo("")
        self._known: dict[tuple[str, str, int, int, MemoryPattern], float] = {}

    def node_seconds(self, node: GraphNode, device: str | None = None) -> float:
        """Predict how long a node takes on an idle device.

        Args:
            node: Its annotation, ``node.metadata["meaning"]``, states its computation and data movement. Without one,
                it is assumed to move its operands and results.
            device: The device; the first one if not given.
        """
        where = self._first if device is None else self._devices[device]
        meaning = meaning_of(node)
        if meaning is not None:
            work = meaning.flops, meaning.bytes_read + meaning.bytes_written, meaning.memory_pattern
        else:
            moved = sum(spec.size_bytes for spec in (*node.specs, *node.input_specs) if spec is not None)
            work = 0, moved, MemoryPattern.SEQUENTIAL
        key = (where.id, node.operation, *work)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = where.profile.seconds(*work, node.operation)
        return known

    def transfer_seconds(self, transfer: Transfer) -> float:
        """Predict how long a transfer takes on an idle link."""
        source = self._devices.get(transfer.source, self._first)
        return source.links.get(transfer.target, _USUAL_LINK).seconds(transfer.size_bytes)

    def estimate(self, schedule: ExecutionSchedule, graph: Graph) -> CostEstimate:
        """Predict the cost of a schedule.

        Every device does one thing at a time, in the schedule's order; so does every link. A transfer begins when its
        value is available. Work on a busy device takes longer by `waiting_s`.
        """
        return self._timed(schedule, graph)[0]

    def timed(self, schedule: ExecutionSchedule, graph: Graph) -> ExecutionSchedule:
        """Return a schedule with the times and the cost that this model predicts for it."""
        estimate, timing = self._timed(schedule, graph)
        return attrs.evolve(schedule, estimate=estimate, spans=timing.spans, transfer_spans=timing.transfer_spans)

    def _timed(self, schedule: ExecutionSchedule, graph: Graph) -> tuple[CostEstimate, _Timing]:
        nodes = {node.id: node for node in graph.nodes()}
        timing = _Timing(self._devices, schedule, graph)
        compute_s = queueing_s = transfer_s = 0.0
        for transfer in schedule.transfers:
            seconds = self.transfer_seconds(transfer)
            transfer_s += seconds
            timing.moves.setdefault(transfer.after, []).append((transfer, seconds))
        timing.moved("")
        for identifier in schedule.order:
            for device in (schedule.devices[identifier], *schedule.replicas.get(identifier, ())):
                service_s = self.node_seconds(nodes[identifier], device)
                wait_s = waiting_s(service_s, self._devices[device].load)
                compute_s += service_s
                queueing_s += wait_s
                timing.ran(identifier, device, service_s + wait_s)
            timing.moved(identifier)
        used = {schedule.devices[node] for node in schedule.order}
        links = [self._devices[transfer.source].links.get(transfer.target, _USUAL_LINK)
                 for transfer in schedule.transfers if transfer.source in self._devices]
        begin_s = max((self._devices[device].profile.run_s for device in used), default=0.0)
        weights = self.weights
        estimate = CostEstimate(
            latency_s=begin_s + timing.end_s, compute_s=compute_s, transfer_s=transfer_s, queueing_s=queueing_s,
            transferred_bytes=sum(transfer.size_bytes for transfer in schedule.transfers),
            score=weights.alpha * compute_s + weights.beta * transfer_s + weights.gamma * queueing_s,
            is_measured=all(self._devices[device].profile.is_measured for device in used)
            and all(link.is_measured for link in links))
        return estimate, timing


_USUAL_LINK = LinkProfile()


class _Timing:
    """Computes when each step happens, if everything happens as early as possible."""

    def __init__(self, devices: Mapping[str, DeviceInfo], schedule: ExecutionSchedule, graph: Graph) -> None:
        self.end_s = 0.0
        self.spans: dict[str, StepSpan] = {}
        """Of nodes, on the devices of the schedule, not where they are repeated."""
        self.transfer_spans: dict[Transfer, StepSpan] = {}
        self.moves: dict[str, list[tuple[Transfer, float]]] = {}
        self._free_s = dict.fromkeys(devices, 0.0)
        self._link_s: dict[tuple[str, str], float] = {}
        self._there_s: dict[tuple[str, str], float] = {}
        """By value and device."""
        self._done_s: dict[str, float] = {}
        self._nodes = {node.id: node for node in graph.nodes()}
        self._schedule = schedule
        self._after: dict[str, list[str]] = {}
        for edge in graph.edges():
            if edge.kind == "hazard":
                self._after.setdefault(edge.target, []).append(edge.source)

    def ran(self, identifier: str, device: str, seconds: float) -> None:
        """Run a node on a device."""
        node = self._nodes[identifier]
        ready_s = self._free_s[device]
        for value in node.inputs:
            ready_s = max(ready_s, self._there_s.get((value, device), 0.0))
        for source in self._after.get(identifier, ()):
            ready_s = max(ready_s, self._done_s[source])
        end_s = self._free_s[device] = ready_s + seconds
        self.spans.setdefault(identifier, StepSpan(ready_s, end_s))
        for value in (*node.outputs, *node.writes):
            self._there_s[value, device] = end_s
        self._done_s[identifier] = max(end_s, self._done_s.get(identifier, 0.0))
        self.end_s = max(self.end_s, end_s)

    def moved(self, after: str) -> None:
        """Execute the transfers that follow a node."""
        waiting = self.moves.pop(after, [])
        for transfer, seconds in _in_chains(waiting):
            link = transfer.source, transfer.target
            begin_s = max(self._link_s.get(link, 0.0), self._there_s.get((transfer.value, transfer.source), 0.0))
            end_s = self._link_s[link] = begin_s + seconds
            self.transfer_spans[transfer] = StepSpan(begin_s, end_s)
            self._there_s[transfer.value, transfer.target] = end_s
            self.end_s = max(self.end_s, end_s)


def _in_chains(moves: Sequence[tuple[Transfer, float]]) -> list[tuple[Transfer, float]]:
    """Order transfers so that each link of a chain comes after the previous one."""
    ordered, rest = list[tuple[Transfer, float]](), list(moves)
    while rest:
        targets = {(move.value, move.target) for move, _ in rest}
        first = [pair for pair in rest if (pair[0].value, pair[0].source) not in targets] or rest
        ordered += first
        rest = [pair for pair in rest if pair not in first]
    return ordered
