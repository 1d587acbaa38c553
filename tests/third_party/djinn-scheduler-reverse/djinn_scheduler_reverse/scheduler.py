"""The scheduler ``reverse``."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from djinn.errors import ScheduleError
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.completion import complete
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule


class ReverseScheduler:
    """Of all nodes that could run next, runs the one that was recorded last; everything on the first device."""

    name = "reverse"

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        """Schedule ``graph`` on ``devices[0]``.

        Raises:
            ScheduleError: There is no device.
        """
        if not devices:
            raise ScheduleError("There is no device to schedule on.", hint="Connect an executor first.")
        order = _latest_first(graph)
        if any(device.holds for device in devices[1:]):
            problem = Problem(graph, devices)
            position = {node.id: index for index, node in enumerate(problem.nodes)}
            return complete(problem, [0] * len(order), [position[name] for name in order], scheduler=self.name)
        return ExecutionSchedule(order, dict.fromkeys(order, devices[0].id), scheduler=self.name)


def _latest_first(graph: Graph) -> tuple[str, ...]:
    names = [node.id for node in graph.nodes()]
    position = {name: index for index, name in enumerate(names)}
    followers: list[list[int]] = [[] for _ in names]
    missing = [0] * len(names)
    for edge in graph.edges():
        followers[position[edge.source]].append(position[edge.target])
        missing[position[edge.target]] += 1
    ready = [-index for index, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        index = -heapq.heappop(ready)
        order.append(names[index])
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, -follower)
    return tuple(order)
