"""What tests of sessions with several executors need."""

from __future__ import annotations

import random
from collections.abc import Sequence

from djinn.fleet.fleet import Fleet
from djinn.fleet.placement import Placed
from djinn.fleet.whereabouts import Whereabouts
from djinn.session import Session
from djinn.tape import Node


class Scattered:
    """A placement without any reason: whatever may run elsewhere does."""

    shares_generator = True

    def __init__(self, executors: int, seed: int) -> None:
        self._executors = executors
        self._random = random.Random(seed)

    def house(self, size_bytes: int, device: object, where: Whereabouts) -> int:
        return self._random.randrange(self._executors)

    def place(self, nodes: Sequence[Node], gone: set[int], where: Whereabouts) -> Placed:
        return [(node, self._random.randrange(self._executors)) for node in nodes]


def fleet_of(session: Session) -> Fleet:
    assert isinstance(session.link, Fleet)
    return session.link


def scatter(session: Session, seed: int = 0) -> Fleet:
    fleet = fleet_of(session)
    fleet._placement = Scattered(len(fleet.links), seed)
    return fleet
