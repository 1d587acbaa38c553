"""Builds the fleet of a session: its connections, a placement, and connections between the servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from djinn.fleet.fleet import Fleet
from djinn.fleet.placement import AutomaticPlacement, ExplicitPlacement, Member
from djinn.kinds import Connection, Scheduler
from djinn.model.graph import Graph
from djinn.planning.profiles import identity_of, load
from djinn.results import cache_for
from djinn.tape import Tape

if TYPE_CHECKING:
    from djinn.session import Session


def compose_fleet(
    connections: Sequence[Connection], session: Session, scheduler: Scheduler | None, tape: Tape, released: deque[int]
) -> Fleet:
    """Create the fleet of a session.

    Args:
        connections: One per executor.
        session: The session that the fleet belongs to.
        scheduler: Decides where operations run; ``None``: the user decides.
        tape: The session's tape.
        released: Numbers of values that the program no longer references.

    Raises:
        PeerError: A server cannot reach another.
        ConfigurationError: The servers' devices or PyTorch releases differ.
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
