"""Schedulers that take only a graph, as earlier documents describe them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import attrs

from djinn.plugins.in_process import register
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule

__all__ = ("SchedulerBase", "SchedulerRegistry", "scheduler_registry")


class SchedulerBase(ABC):
    """A scheduler that takes a graph.

    Attributes:
        devices: Where the graph may run.
    """

    devices: Sequence[DeviceInfo] = ()

    @abstractmethod
    def schedule(self, graph: Graph) -> ExecutionSchedule:
        """Decide where the nodes run."""


@attrs.frozen
class _Named:
    """Such a scheduler, as a plugin."""

    name: str
    _make: type[SchedulerBase]

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        """Let it decide."""
        made = self._make()
        made.devices = devices
        return attrs.evolve(made.schedule(graph), scheduler=self.name)


class SchedulerRegistry:
    """The schedulers of this process."""

    def register(self, name: str, scheduler: type[SchedulerBase]) -> None:
        """Let ``djinn.schedule(graph, name)`` use a scheduler."""
        register(_Named(name, scheduler), "scheduler")


scheduler_registry = SchedulerRegistry()
