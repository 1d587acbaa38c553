"""The scheduler for one device."""

from __future__ import annotations

from collections.abc import Sequence

from djinn.errors import ScheduleError
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.completion import complete
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule


class SingleScheduler:
    """Runs everything on the first device in program order, except for nodes that cannot run there."""

    name = "single"

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        """Schedule ``graph`` on ``devices[0]``.

        Values on other devices that the graph writes, or makes views of, stay there, and so do the nodes that do this.

        Raises:
            ScheduleError: There is no device, or a node concerns storages that several devices hold.
        """
        if not devices:
            raise ScheduleError("There is no device to schedule on.", hint="Connect an executor first.")
        if any(device.holds for device in devices[1:]):
            problem = Problem(graph, devices)
            count = len(problem.nodes)
            return complete(problem, [0] * count, range(count), scheduler=self.name)
        order = tuple(node.id for node in graph.topological_sort())
        return ExecutionSchedule(order, dict.fromkeys(order, devices[0].id), scheduler=self.name)
