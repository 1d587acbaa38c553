"""Opening a fleet: connections, a placement, and servers that are connected to each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from djinn.ir.tape import Tape
from djinn.kinds import Backend, BackendContext, Connection
from djinn.settings import Config
from djinn_plugins.common.settings.placement import PlacementSettings
from djinn_plugins.fleet.checking import NAME
from djinn_plugins.fleet.fleet import Fleet
from djinn_plugins.fleet.loads import FleetLoads
from djinn_plugins.fleet.phases import PhasePlacement
from djinn_plugins.fleet.placement import AutomaticPlacement, ExplicitPlacement, member_of
from djinn_plugins.graph.analysis import annotate_graph
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.placing import Placement
from djinn_plugins.schedule.semantics import with_meaning


class FleetFactory:
    """Makes backends for sessions with several executors; see `djinn.kinds.backend.BackendFactory`."""

    name = NAME

    def open(self, connections: Sequence[Connection], tape: Tape, released: deque[int],
             context: BackendContext) -> Backend:
        """Make a fleet.

        Raises:
            PeerError: A server cannot reach another.
            ConfigurationError: The servers are not alike.
        """
        chosen = context.settings(PlacementSettings).placement
        loads = FleetLoads(connections, are_read=chosen != "explicit")
        placement = _placement(chosen, connections, context, loads)
        fleet = Fleet(connections, tape, released, placement, loads, context.pace, context.wrapped,
                      is_debugging=context.settings(Config).debug)
        fleet.introduce()
        return fleet


def _placement(
    chosen: str, connections: Sequence[Connection], context: BackendContext, loads: FleetLoads,
) -> Placement:
    if chosen == "explicit":
        return ExplicitPlacement()
    members = [member_of(f"{context.device.type}:{index}", connection) for index, connection in enumerate(connections)]
    if chosen == "phases":
        return PhasePlacement(members, _annotated, loads)
    return AutomaticPlacement(context.plugins.choose("scheduler", "latency"), members, _annotated, loads)


def _annotated(graph: Graph) -> Graph:
    return with_meaning(annotate_graph(graph))
