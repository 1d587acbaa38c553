"""The rules that a schedule keeps."""

from __future__ import annotations

from collections.abc import Sequence

from djinn.errors import ScheduleError
from djinn.model.graph import Graph
from djinn.model.schedule import DeviceInfo, ExecutionSchedule


def check_schedule(schedule: ExecutionSchedule, graph: Graph, devices: Sequence[DeviceInfo]) -> None:
    """Check a schedule against its graph.

    Raises:
        ScheduleError: Names the first rule that is broken: *complete* (every node once), *devices* (known ones only),
            *order* (every edge points forward), *transfers* (a value crosses devices only where it is listed).
    """

    def refuse(rule: str, what: str) -> ScheduleError:
        return ScheduleError(f"The schedule of {schedule.scheduler or 'a scheduler'} breaks the rule {rule!r}: {what}.",
                             hint="Nothing was run. Choose another scheduler or report this to its author.")

    expected = {node.id for node in graph.nodes()}
    if len(schedule.order) != len(set(schedule.order)) or set(schedule.order) != expected:
        raise refuse("complete", f"{len(expected)} nodes are to run, it orders {len(schedule.order)}")
    known = {device.id for device in devices}
    for node in schedule.order:
        if schedule.devices.get(node) not in known:
            raise refuse("devices", f"node {node} is placed on {schedule.devices.get(node)!r}")
    position = {node: index for index, node in enumerate(schedule.order)}
    listed = {(transfer.value, transfer.source, transfer.target) for transfer in schedule.transfers}
    for edge in graph.edges():
        if position[edge.source] >= position[edge.target]:
            raise refuse("order", f"{edge.target} needs {edge.source} ({edge.kind} {edge.value}) and runs before it")
        source, target = schedule.devices[edge.source], schedule.devices[edge.target]
        if source != target and edge.kind == "data" and (edge.value, source, target) not in listed:
            raise refuse("transfers", f"{edge.value} crosses from {source} to {target} unlisted")
