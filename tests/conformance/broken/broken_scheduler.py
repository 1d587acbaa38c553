"""A scheduler that spreads nodes over devices and keeps every law, and others that do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from djinn.hookspecs import hookimpl
from djinn_plugins.graph.graph import Edge, Graph
from djinn_plugins.schedule.completion import complete
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule, Transfer

BROKEN: dict[str, tuple[str, set[str]]] = {
    "forgets-last": ("scheduler.complete", {"scheduler.deep_graph"}),
    "twice": ("scheduler.complete", {"scheduler.deep_graph"}),
    "data-only": ("scheduler.order_valid", set()),
    "unlisted-transfers": ("scheduler.order_valid", {"scheduler.homes_kept"}),
    "dreams-of-devices": ("scheduler.devices_known", set()),
    "counts": ("scheduler.deterministic", set()),
    "scribbles": ("scheduler.graph_unchanged", set()),
    "moves-nothing": ("scheduler.empty_graph", {"scheduler.order_valid", "scheduler.homes_kept"}),
    "recursive": ("scheduler.deep_graph", set()),
    "drops-homes": ("scheduler.homes_kept", {"scheduler.order_valid"}),
    "restless": ("scheduler.transfers_minimal", set()),
    "overfills": ("scheduler.memory_kept", set()),
}
"""Name of each broken scheduler, the law that it breaks, and others that it may break as a consequence."""
_LARGE = 1000


class _Scheduler:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._count = itertools.count()

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        if self._flaw == "recursive":
            _reach([node.id for node in graph.nodes()], list(graph.edges()))
        return self._spoilt(self._healthy(graph, devices), graph, devices)

    def _healthy(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        problem = Problem(graph, devices)
        count = len(problem.nodes)
        if count > _LARGE:
            order = tuple(node.id for node in graph.nodes())
            return ExecutionSchedule(order, dict.fromkeys(order, devices[0].id), scheduler=self.name)
        whole = sum(problem.size)
        is_bounded = self._flaw != "overfills" and any(
            device.memory_bytes is not None and device.memory_bytes < whole for device in devices)
        place = [0 if is_bounded else node % len(devices) for node in range(count)]
        made = complete(problem, place, range(count), scheduler=self.name)
        return attrs.evolve(made, budgets={})

    def _spoilt(self, made: ExecutionSchedule, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        if self._flaw == "data-only":
            edges = [edge for edge in graph.edges() if edge.kind == "data"]
            return attrs.evolve(made, order=tuple(_latest_first(list(made.order), edges)))
        if self._flaw == "dreams-of-devices" and made.order:
            return attrs.evolve(made, devices={**made.devices, made.order[-1]: "quantum:0"})
        if self._flaw == "drops-homes":
            views = [node.id for node in graph.nodes() if any(value in graph.storages for value in node.outputs)]
            elsewhere = {view: device.id for view in views for device in devices if device.id != made.devices[view]}
            return attrs.evolve(made, devices={**made.devices, **elsewhere}, replicas={
                node: places for node, places in made.replicas.items() if node not in elsewhere})
        if self._flaw == "restless" and len(devices) > 1:
            there = {transfer.value for transfer in made.transfers}
            home = {value: device.id for device in devices for value in device.holds} | dict(made.placements)
            extra = next((Transfer(value, place, device.id) for value, place in home.items() for device in devices
                          if value not in there and device.id != place), None)
            return made if extra is None else attrs.evolve(made, transfers=(*made.transfers, extra))
        if self._flaw == "forgets-last":
            return attrs.evolve(made, order=made.order[:-1])
        if self._flaw == "twice":
            return attrs.evolve(made, order=made.order + made.order[-1:])
        if self._flaw == "unlisted-transfers":
            return attrs.evolve(made, transfers=())
        if self._flaw == "counts":
            return attrs.evolve(made, scheduler=f"counts {next(self._count)}")
        if self._flaw == "moves-nothing" and not made.order and len(devices) > 1:
            return attrs.evolve(made, transfers=(Transfer("", devices[0].id, devices[1].id),))
        if self._flaw == "scribbles":
            for node in graph.nodes():
                if isinstance(node.metadata, dict):
                    node.metadata["scheduled"] = True
        return made


def _latest_first(order: list[str], edges: list[Edge]) -> list[str]:
    """Sort topologically, later nodes first wherever data allow it."""
    waits = dict.fromkeys(order, 0)
    follow: dict[str, list[str]] = {node: [] for node in order}
    for edge in edges:
        waits[edge.target] += 1
        follow[edge.source].append(edge.target)
    ready, done = [node for node in order if not waits[node]], []
    while ready:
        done.append(ready.pop())
        for target in follow[done[-1]]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return done


def _reach(order: list[str], edges: list[Edge]) -> None:
    before: dict[str, str] = {}
    for edge in edges:
        before.setdefault(edge.target, edge.source)

    def visit(node: str) -> int:
        return 1 + visit(before[node]) if node in before else 1

    for node in order[-1:]:
        visit(node)


@hookimpl
def djinn_register_schedulers(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Scheduler(name))
