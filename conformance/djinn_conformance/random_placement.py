"""Sessions with several executors whose operations run on arbitrary ones: the results must be right anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch

from djinn.ir.tape import Node
from djinn.session.session import Session
from djinn_plugins.schedule.placing import Placed, SupportsPlacement, ValueDirectory, placing_of
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, LinkProfile

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

    def device_count(self, executors: int) -> int:
        """Return 1: all are one device."""
        return 1

    def devices(self, where: ValueDirectory, values: Sequence[int] = ()) -> list[DeviceInfo]:
        """Describe nothing: no scheduler is asked."""
        return []

    def house(self, size_bytes: int, device: torch.device | None, where: ValueDirectory) -> int:
        """Put an upload anywhere."""
        return self._lot(f"{size_bytes}")

    def place(self, nodes: Sequence[Node], gone: set[int], where: ValueDirectory) -> Placed:
        """Run everything anywhere, in program order."""
        return [(node, self._lot(f"{index} {node.signature.template.operator}")) for index, node in enumerate(nodes)]

    def pin(self, executor: int | None) -> None:
        """Do nothing: placement stays random."""

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Do nothing: placement stays random."""

    def _lot(self, what: str) -> int:
        return crc32(f"{self._seed} {what}".encode()) % self._executors


def scatter(session: Session, seed: int) -> SupportsPlacement:
    """Let operations of a session with several executors run anywhere.

    Raises:
        TypeError: The session has one executor.
    """
    placing = placing_of(session.backend)
    if placing is None:
        raise TypeError("One executor leaves no choice.")
    placing.use(Scattered(len(session.backend.executors), seed))
    return placing
