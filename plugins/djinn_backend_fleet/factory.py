"""Opening a fleet: connections, a placement, and servers that are connected to each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from djinn_lib_graph.analysis import annotate_graph
from djinn_lib_graph.graph import Graph
from djinn_lib_schedule.placing import Placement
from djinn_lib_schedule.profiles import identity_of, load
from djinn_lib_schedule.semantics import with_meaning

from djinn.ir.tape import Tape
from djinn.kinds import Backend, BackendContext, Connection
from djinn.settings import Config
from djinn_backend_fleet.fleet import Fleet
from djinn_backend_fleet.loads import FleetLoads
from djinn_backend_fleet.placement import AutomaticPlacement, ExplicitPlacement, FleetMember


class FleetFactory:
    """Makes backends for sessions with several executors; see `djinn.kinds.backend.BackendFactory`."""

    name = "fleet"

    def open(self, connections: Sequence[Connection], tape: Tape, released: deque[int],
             context: BackendContext) -> Backend:
        """Make a fleet.

        Raises:
            PeerError: A server cannot reach another.
            ConfigurationError: The servers are not alike, or a setting needs a session with one executor.
        """
        settings = context.settings(Config)
        is_explicit = settings.placement == "explicit"
        loads = FleetLoads(connections, are_read=not is_explicit)
        placement = ExplicitPlacement() if is_explicit else _automatic(connections, context, loads)
        fleet = Fleet(connections, tape, released, placement, loads, context.pace, is_debugging=settings.debug)
        fleet.use_cache(context.open_cache)
        fleet.introduce()
        return fleet


def _automatic(connections: Sequence[Connection], context: BackendContext, loads: FleetLoads) -> Placement:
    found = [load(identity_of(connection)) for connection in connections]
    members = [FleetMember(f"{context.device.type}:{index}", connection.welcome, known.profile,
                           home_link=known.home_link)
               for index, (connection, known) in enumerate(zip(connections, found, strict=True))]
    return AutomaticPlacement(context.plugins.choose("scheduler", "latency"), members, _annotated, loads)


def _annotated(graph: Graph) -> Graph:
    return with_meaning(annotate_graph(graph))
