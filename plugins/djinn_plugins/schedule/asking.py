"""Asking a scheduler, wherever one is used: it is timed and counted."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from djinn_plugins.common.tracing.totals import TOTALS
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.kinds import GraphScheduler
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule

__all__ = ("scheduled",)


def scheduled(scheduler: GraphScheduler, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
    """Return the schedule of a scheduler, which the caller checks."""
    begin_s = perf_counter()
    made = scheduler.schedule(graph, devices)
    TOTALS.scheduled(made.scheduler or scheduler.name, perf_counter() - begin_s)
    return made
