"""Which executor runs what, across the deaths of servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from djinn.kinds import Backend
from djinn_plugins.schedule.placing import Placement, SupportsPlacement, placing_of
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, LinkProfile

__all__ = ("RecoveringPlacement",)


class RecoveringPlacement:
    """Passes on to the backend that there is now; a `djinn_plugins.schedule.placing.SupportsPlacement`.

    Args:
        now: Returns that backend, which has several executors.
    """

    def __init__(self, now: Callable[[], Backend]) -> None:
        self._now = now
        self._pinned: int | None = None

    @property
    def _plain(self) -> SupportsPlacement:
        placing = placing_of(self._now())
        assert placing is not None
        return placing

    def pin(self, executor: int | None) -> None:
        """Let everything run on one executor, also after a recovery; ``None``: wherever the placement wants it."""
        self._pinned = executor
        self._plain.pin(executor)

    def pin_again(self, backend: Backend) -> None:
        """Let everything run on the same executor of another backend, or on its last one."""
        placing = placing_of(backend)
        if self._pinned is not None and placing is not None:
            placing.pin(min(self._pinned, len(backend.executors) - 1))

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Use new measurements of an executor, of those that there are now."""
        self._plain.learn(executor, profile, home_link, links)

    @property
    def placement(self) -> Placement:
        """What decides now where operations run."""
        return self._plain.placement

    def use(self, placement: Placement) -> None:
        """Let another placement decide, until the servers change."""
        self._plain.use(placement)

    def devices(self, values: Sequence[int]) -> list[DeviceInfo]:
        """Describe the executors to a scheduler."""
        return self._plain.devices(values)
