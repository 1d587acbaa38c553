"""The scheduler ``throughput``."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_lib_graph.graph import Graph
from djinn_lib_schedule.colocation import Homes
from djinn_lib_schedule.completion import complete
from djinn_lib_schedule.memory_fallback import within_memory
from djinn_lib_schedule.problem import Problem
from djinn_lib_schedule.schedule import DeviceInfo, ExecutionSchedule

from djinn_scheduler_throughput.packing import Packer, Packing, better

_IMPROVING = 6_000


class ThroughputScheduler:
    """Runs graphs so that as many as possible are done in a time, if they come one after the other.

    Then only what is busiest counts, a device or a link. Pieces of work are packed into devices, in program order and
    by size, and the packing is taken whose busiest part is least busy; of those that are equal, the one that moves
    least. What reads the same weights stays together, and nodes that read weights which a device holds go there.
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
        # In program order, what is made is used soon: nothing is kept longer than it was in the user's program.
        return complete(problem, best.place, range(len(best.place)), scheduler=self.name, homes=homes)
