"""Makes a schedule again if it takes more memory than there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.colocation import Homes, find_homes
from djinn_plugins.schedule.completion import complete, settled
from djinn_plugins.schedule.memory_budget import is_over
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule


def within_memory(
    graph: Graph, devices: Sequence[DeviceInfo], scheduler: str,
    make: Callable[[Problem, Homes, bool], ExecutionSchedule],
) -> ExecutionSchedule:
    """Make a schedule; if it takes more memory than there is, make a more careful one.

    Args:
        graph: The graph.
        devices: Where it may run.
        scheduler: Name of the scheduler.
        make: Makes the schedule; the last argument is whether to count memory as if nothing were freed.

    Raises:
        ScheduleError: There is no device, or a node concerns storages that several devices hold.
    """
    problem = Problem(graph, devices)
    homes = find_homes(problem)
    if len(problem.devices) == 1 or not problem.nodes:
        return complete(problem, [0] * len(problem.nodes), scheduler=scheduler, homes=homes)
    made = make(problem, homes, False)
    if not is_over(problem, made.budgets):
        return made
    careful = make(problem, homes, True)
    if not is_over(problem, careful.budgets):
        return careful
    for device in range(len(problem.devices)):
        # A single device may have room for everything even if packing by pieces has found no solution.
        whole = complete(problem, settled(homes, [device] * len(problem.nodes)), scheduler=scheduler, homes=homes)
        if not is_over(problem, whole.budgets):
            return whole
    return made
