"""Schedulers decide which device runs which operation, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule


class GraphScheduler(Protocol):
    """Creates a schedule from a graph. Called once per program, not once per run."""

    name: str
    """Name in the configuration."""

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        """Schedule every node of ``graph`` on ``devices``.

        Returns:
            A schedule that `djinn_plugins.schedule.check.check_schedule` accepts.

        Laws:
            scheduler.complete, scheduler.order_valid, scheduler.devices_known, scheduler.homes_kept,
            scheduler.transfers_minimal, scheduler.memory_kept, scheduler.deterministic, scheduler.graph_unchanged,
            scheduler.empty_graph, scheduler.deep_graph
        """
