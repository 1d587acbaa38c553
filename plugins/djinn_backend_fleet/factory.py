"""Opening a fleet: connections, a placement, and servers that are connected to each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial, reduce

from djinn_lib_graph.analysis import annotate_graph
from djinn_lib_graph.graph import Graph
from djinn_lib_schedule.placing import Placement
from djinn_lib_schedule.semantics import with_meaning

from djinn.ir.tape import Tape
from djinn.kinds import Backend, BackendContext, Connection
from djinn.settings import Config
from djinn_backend_fleet.fleet import Fleet
from djinn_backend_fleet.loads import FleetLoads
from djinn_backend_fleet.phases import PhasePlacement
from djinn_backend_fleet.placement import AutomaticPlacement, ExplicitPlacement, member_of


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
        loads = FleetLoads(connections, are_read=settings.placement != "explicit")
        placement = _placement(settings.placement, connections, context, loads)
        fleet = Fleet(connections, tape, released, placement, loads, context.pace, partial(_wrapped, context),
                      is_debugging=settings.debug)
        fleet.use_cache(context.open_cache)
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


def _wrapped(context: BackendContext, connection: Connection) -> Connection:
    """Wrap a connection as the session wraps those that it begins with."""
    wrappers = reversed(context.plugins.hook.djinn_wrap_connection(context=context))
    return reduce(lambda plain, wrap: wrap(plain), wrappers, connection)


def _annotated(graph: Graph) -> Graph:
    return with_meaning(annotate_graph(graph))
