"""The scheduler ``throughput``."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.colocation import Homes
from djinn_plugins.schedule.completion import complete
from djinn_plugins.schedule.memory_fallback import within_memory
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule
from djinn_plugins.schedule.throughput.packing import Packer, Packing, better

_IMPROVING = 6_000


class ThroughputScheduler:
    """Schedules graphs for the highest throughput, if they run one after another.

    Then only the busiest device or link counts. Pieces of work are packed into devices, in program order and by size,
    and the packing with the lowest maximum load is used; of equal packings, the one with the fewest transfers. Nodes
    that read the same weights stay together, and nodes that read weights of a device run there.
    """

    name = "throughput"

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        """Schedule ``graph`` on ``devices``.

        Raises:
            ScheduleError: There is no device, or a node concerns storages that several devices hold.
        """
        return within_memory(graph, devices, self.name, self._made)

    def _made(self, problem: Problem, homes: Homes, is_strict: bool) -> ExecutionSchedule:
        packer = Packer(problem, homes, is_strict=is_strict)
        best: Packing | None = None
        for packing in packer.ways():
            if best is None or better(packing, best):
                best = packing
        assert best is not None, "there is at least one way"
        best = packer.improved(best, _IMPROVING)
        # In program order, values are used soon after they are made, and live no longer than in the user's program.
        return complete(problem, best.place, range(len(best.place)), scheduler=self.name, homes=homes)
