"""Backends that let a scheduler decide where operations run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import torch

from djinn.ir.tape import Node
from djinn.kinds import Backend, Connection
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, LinkProfile

if TYPE_CHECKING:
    from djinn.session.session import Session

__all__ = ("GrowingPlacement", "Placed", "Placement", "SupportsJoining", "SupportsPlacement", "ValueDirectory",
           "pinned")

Placed: TypeAlias = list[tuple[Node, int]]
"""Nodes in the order in which they run, each with the position of its executor. A node that has no effects may be
listed several times in succession, with different executors; the first is the home of its results.
"""


class HeldValue(Protocol):
    """The storage of one value, and its copies."""

    @property
    def storage(self) -> int:
        """Number of its storage."""

    @property
    def copies(self) -> set[int]:
        """Executors that have a copy."""


class ValueDirectory(Protocol):
    """Where values are."""

    homes: dict[int, int]
    """The executor that owns each storage."""
    held_bytes: list[int]
    """Bytes that each executor holds."""

    def find(self, number: int) -> HeldValue | None:
        """Look a value up."""

    def is_at(self, number: int, executor: int) -> bool:
        """Whether an executor has a value, or a copy of it."""

    def home_of(self, number: int) -> int | None:
        """Return the executor that owns a value."""


class Placement(Protocol):
    """Decides where things are.

    Attributes:
        shares_generator: Whether all executors draw from one stream of random numbers, as one device would.
    """

    shares_generator: bool

    def device_count(self, executors: int) -> int:
        """Return how many logical devices so many executors are."""

    def devices(self, where: ValueDirectory, values: Sequence[int] = ()) -> list[DeviceInfo]:
        """Describe the executors to a scheduler, in their order.

        Args:
            where: Where values are.
            values: Values whose place matters.
        """

    def house(self, size_bytes: int, device: torch.device | None, where: ValueDirectory) -> int:
        """Choose the executor that is to hold an upload."""

    def place(self, nodes: Sequence[Node], gone: set[int], where: ValueDirectory) -> Placed:
        """Choose executor and order of a piece of tape."""

    def pin(self, executor: int | None) -> None:
        """Let everything run on one executor; ``None``: wherever it is placed."""

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Use new measurements of an executor, and of the links from it."""


@runtime_checkable
class GrowingPlacement(Placement, Protocol):
    """A placement that can use an executor which joins the others later."""

    def add(self, connection: Connection) -> None:
        """Place new work on another executor, too."""


@runtime_checkable
class SupportsPlacement(Protocol):
    """Lets something else than a backend with several executors say which of them runs what."""

    def pin(self, executor: int | None) -> None:
        """Let everything run on one executor; ``None``: wherever the placement wants it."""

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Use new measurements of an executor, and of the links from it to others."""

    @property
    def placement(self) -> Placement:
        """What decides now."""

    def use(self, placement: Placement) -> None:
        """Let another placement decide."""

    def devices(self, values: Sequence[int]) -> list[DeviceInfo]:
        """Describe the executors to a scheduler; see `Placement.devices`."""


@runtime_checkable
class SupportsJoining(Protocol):
    """A backend that another executor can join while it holds values."""

    @property
    def may_grow(self) -> bool:
        """Whether one can join now."""

    def add(self, connection: Connection) -> None:
        """Let another executor take part in new work. All submitted work must have been answered.

        Args:
            connection: To the executor; owned by the backend, unless this raises.

        Raises:
            PeerError: It cannot be reached from the others, or they from it. Nothing is changed then.
            ConfigurationError: It is not like the others.
            TransportError: A connection is gone.
        """


def placing_of(backend: Backend) -> SupportsPlacement | None:
    """Return what lets others say which executor runs what; ``None`` if the session has one executor."""
    found = getattr(backend, "placing", backend)
    return found if isinstance(found, SupportsPlacement) else None


@contextmanager
def pinned(session: Session, executor: int) -> Iterator[torch.device]:
    """Let everything run on one executor for the length of a block, and give the device that stands for it.

    Where the user chooses among devices, that device has to be named in the block.
    """
    placing = placing_of(session.backend)
    with session.lock:
        session.flush()
        if placing is not None:
            placing.pin(executor)
        try:
            index = executor if session.backend.device_count > 1 else session.device.index
            yield torch.device(session.device.type, index)
            session.flush()
        finally:
            if placing is not None:
                placing.pin(None)
