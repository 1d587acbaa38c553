"""The order of a new program's operations, as the scheduler wants it."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from djinn.ir.tape import Node
from djinn.session.session import Session
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.schedule.asking import scheduled
from djinn_plugins.schedule.check import check_schedule
from djinn_plugins.schedule.kinds import GraphScheduler
from djinn_plugins.schedule.profiles import calibration_of
from djinn_plugins.schedule.schedule import DeviceInfo


class Arranger:
    """Asks the scheduler once for each new program.

    Args:
        session: Whose programs.

    Raises:
        PluginError: There is no such scheduler.
    """

    def __init__(self, session: Session) -> None:
        self._session = ref(session)
        self._scheduler: GraphScheduler = session.plugins.choose("scheduler", "single")

    def __call__(self, nodes: Sequence[Node]) -> list[int] | None:
        """Return the positions of nodes in the order in which they run; ``None`` for program order.

        Raises:
            ScheduleError: The schedule breaks a rule.
        """
        session = self._session()
        assert session is not None
        graph = graph_of(nodes)
        known = calibration_of(session)
        devices = [DeviceInfo(str(session.device), profile=known.profile, home_link=known.home_link)]
        schedule = scheduled(self._scheduler, graph, devices)
        check_schedule(schedule, graph, devices)
        positions = {node.id: index for index, node in enumerate(graph.nodes())}
        order = [positions[node] for node in schedule.order]
        return None if order == list(range(len(nodes))) else order
