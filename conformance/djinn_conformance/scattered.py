"""Sessions with several executors whose operations run on arbitrary ones: the results must be right anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch

from djinn.fleet.fleet import Fleet
from djinn.fleet.placement import Placed
from djinn.fleet.whereabouts import Whereabouts
from djinn.model.schedule import DeviceProfile, LinkProfile
from djinn.session import Session
from djinn.tape import Node

__all__ = ("Scattered", "scatter")


class Scattered:
    """A random placement, deterministic for equal pieces of tape.

    Args:
        executors: How many there are.
        seed: Seed of the random choices.
    """

    shares_generator = True

    def __init__(self, executors: int, seed: int) -> None:
        self._executors = executors
        self._seed = seed

    def house(self, size_bytes: int, device: torch.device | None, where: Whereabouts) -> int:
        """Choose a random executor for an upload."""
        return self._lot(f"{size_bytes}")

    def place(self, nodes: Sequence[Node], gone: set[int], where: Whereabouts) -> Placed:
        """Choose a random executor for each operation, in program order."""
        return [(node, self._lot(f"{index} {node.signature.template.operator}")) for index, node in enumerate(nodes)]

    def pin(self, executor: int | None) -> None:
        """Do nothing: placement stays random."""

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Do nothing: placement stays random."""

    def _lot(self, what: str) -> int:
        return crc32(f"{self._seed} {what}".encode()) % self._executors


def scatter(session: Session, seed: int) -> Fleet:
    """Make the operations of a session with several executors run on random ones.

    Raises:
        TypeError: The session has one executor.
    """
    fleet = session.link
    if not isinstance(fleet, Fleet):
        raise TypeError("One executor leaves no choice.")
    fleet.use(Scattered(len(fleet.links), seed))
    return fleet
