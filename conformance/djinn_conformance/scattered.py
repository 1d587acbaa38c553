"""Sessions with several executors whose operations run anywhere: no reason is needed for results to be right."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from djinn.fleet.fleet import Fleet
from djinn.fleet.placement import Placed
from djinn.fleet.whereabouts import Whereabouts
from djinn.session import Session
from djinn.tape import Node

__all__ = ("Scattered", "scatter")


class Scattered:
    """A placement that draws lots.

    Args:
        executors: How many there are.
        seed: Of the lots.
    """

    shares_generator = True

    def __init__(self, executors: int, seed: int) -> None:
        self._executors = executors
        self._random = random.Random(seed)

    def house(self, size_bytes: int, device: torch.device | None, where: Whereabouts) -> int:
        """Put an upload anywhere."""
        return self._random.randrange(self._executors)

    def place(self, nodes: Sequence[Node], gone: set[int], where: Whereabouts) -> Placed:
        """Run everything anywhere, in program order."""
        return [(node, self._random.randrange(self._executors)) for node in nodes]


def scatter(session: Session, seed: int) -> Fleet:
    """Let operations of a session with several executors run anywhere from now on.

    Raises:
        TypeError: The session has one executor.
    """
    fleet = session.link
    if not isinstance(fleet, Fleet):
        raise TypeError("One executor leaves no choice.")
    fleet.use(Scattered(len(fleet.links), seed))
    return fleet
