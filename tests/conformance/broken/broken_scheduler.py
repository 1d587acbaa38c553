"""A scheduler that spreads nodes over devices and keeps every law, and others that do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from djinn.hookspecs import hookimpl
from djinn.model.graph import Edge, Graph
from djinn.model.schedule import DeviceInfo, ExecutionSchedule, Transfer

BROKEN: dict[str, tuple[str, set[str]]] = {
    "forgets-last": ("scheduler.complete", {"scheduler.deep_graph"}),
    "twice": ("scheduler.complete", {"scheduler.deep_graph"}),
    "data-only": ("scheduler.order_valid", set()),
    "unlisted-transfers": ("scheduler.order_valid", set()),
    "dreams-of-devices": ("scheduler.devices_known", {"scheduler.order_valid"}),
    "counts": ("scheduler.deterministic", set()),
    "scribbles": ("scheduler.graph_unchanged", set()),
    "moves-nothing": ("scheduler.empty_graph", set()),
    "recursive": ("scheduler.deep_graph", set()),
}
"""Name of each broken scheduler, the law that it breaks, and others that it may break as a consequence."""


class _Scheduler:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw
        self._count = itertools.count()

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        order = [node.id for node in graph.nodes()]
        edges = list(graph.edges())
        if self._flaw == "data-only":
            order = _latest_first(order, [edge for edge in edges if edge.kind == "data"])
        if self._flaw == "recursive":
            _reach(order, edges)
        place = {node: devices[index % len(devices)].id for index, node in enumerate(order)}
        if self._flaw == "dreams-of-devices" and order:
            place[order[-1]] = "quantum:0"
        crossing = {(edge.value, place[edge.source], place[edge.target]) for edge in edges
                    if edge.kind == "data" and place[edge.source] != place[edge.target]}
        transfers = tuple(Transfer(*entry) for entry in sorted(crossing))
        made = ExecutionSchedule(tuple(order), place, transfers, self.name)
        return self._spoilt(made, graph, devices)

    def _spoilt(self, made: ExecutionSchedule, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
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
