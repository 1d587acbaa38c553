"""Composing a fleet: connections, a placement, and servers that know each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from djinn.fleet.fleet import Fleet
from djinn.fleet.placement import AutomaticPlacement, ExplicitPlacement, Member
from djinn.ir.tape import Tape
from djinn.kinds import Connection, Scheduler
from djinn.model.graph import Graph
from djinn.planning.profiles import identity_of, load
from djinn.results import cache_for

if TYPE_CHECKING:
    from djinn.session import Session


def compose_fleet(
    connections: Sequence[Connection], session: Session, scheduler: Scheduler | None, tape: Tape, released: deque[int]
) -> Fleet:
    """Make the fleet of a session.

    Args:
        connections: One for each executor.
        session: Whose fleet it is.
        scheduler: Decides where things run; ``None``: the user does.
        tape: What is to be handed over.
        released: Numbers of values that nobody names any more.

    Raises:
        PeerError: A server cannot reach another.
        ConfigurationError: The servers are not alike.
    """
    placement: ExplicitPlacement | AutomaticPlacement = ExplicitPlacement()
    if scheduler is not None:
        found = [load(identity_of(connection)) for connection in connections]
        members = [Member(f"{session.device.type}:{index}", connection.welcome, known.profile,
                          home_link=known.home_link)
                   for index, (connection, known) in enumerate(zip(connections, found, strict=True))]
        placement = AutomaticPlacement(scheduler, members, _with_meaning)
    fleet = Fleet(connections, tape, released, placement, session.pace,
                  is_debugging=session.config.debug)
    fleet.keep_results(cache_for(session.config.result_cache_bytes, session.classifier))
    fleet.introduce()
    return fleet


def _with_meaning(graph: Graph) -> Graph:
    from djinn.analysis import annotate_graph
    from djinn.planning.meaning import with_meaning

    return with_meaning(annotate_graph(graph))
