"""The scheduler for one device."""

from __future__ import annotations

from collections.abc import Sequence

from djinn.errors import ScheduleError
from djinn.model.graph import Graph
from djinn.model.schedule import DeviceInfo, ExecutionSchedule


class SingleScheduler:
    """Runs everything on the first device in program order."""

    name = "single"

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        """Schedule ``graph`` on ``devices[0]``.

        Raises:
            ScheduleError: There is no device.
        """
        if not devices:
            raise ScheduleError("There is no device to schedule on.", hint="Connect an executor first.")
        order = tuple(node.id for node in graph.topological_sort())
        return ExecutionSchedule(order, dict.fromkeys(order, devices[0].id), scheduler=self.name)
