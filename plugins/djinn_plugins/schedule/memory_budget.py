"""Tracks which device has room for which nodes during placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from djinn_plugins.schedule.colocation import Homes
from djinn_plugins.schedule.problem import NOWHERE, Problem


class Room:
    """Memory accounting by groups of nodes that must be together.

    Args:
        problem: The graph and its devices.
        homes: The groups.
        is_strict: Whether to count everything that a group reads or creates, as if nothing were ever freed. Otherwise,
            only the values to be placed on the device of the node that first reads them are counted.
    """

    def __init__(self, problem: Problem, homes: Homes, *, is_strict: bool) -> None:
        self._left = problem.room()
        self._is_strict = is_strict
        self._size = problem.size
        self._new: dict[int, set[int]] = {}
        self._placed: set[int] = set()
        self.is_bounded = any(left != float("inf") for left in self._left)
        """Whether any device has a limit."""
        if not self.is_bounded:
            return
        for node, group in enumerate(homes.group):
            new = self._new.setdefault(group, set())
            for value in (*problem.reads[node], *problem.makes[node]):
                storage = problem.root[value]
                if is_strict:
                    new.add(value)
                    new.add(storage)
                elif problem.maker[value] == NOWHERE and storage not in problem.held:
                    new.add(storage)
        if is_strict:
            for group in sorted(self._new):
                if homes.pinned[group] != NOWHERE:
                    self.take(group, homes.pinned[group])

    def needed(self, group: int) -> int:
        """Return the bytes that a group needs on its device."""
        new = self._new.get(group, ())
        return sum(self._size[value] for value in new if value not in self._placed)

    def fits(self, group: int, device: int) -> bool:
        """Return whether a device has room for a group."""
        return not self.is_bounded or self.needed(group) <= self._left[device]

    def fits_all(self, groups: Iterable[int], device: int) -> bool:
        """Return whether a device has room for several groups."""
        if not self.is_bounded:
            return True
        if self._is_strict:
            return sum(map(self.needed, groups)) <= self._left[device]
        new = {value for group in groups for value in self._new.get(group, ())} - self._placed
        return sum(self._size[value] for value in new) <= self._left[device]

    def roomiest(self) -> int:
        """Return the device with the most room."""
        return max(range(len(self._left)), key=lambda device: (self._left[device], -device))

    def take(self, group: int, device: int) -> None:
        """Place a group."""
        if self.is_bounded and group in self._new:
            self._left[device] -= self.needed(group)
            if not self._is_strict:
                self._placed |= self._new[group]
            del self._new[group]


def is_over(problem: Problem, budgets: Mapping[str, int]) -> bool:
    """Return whether a device would exceed its memory."""
    return any(device.memory_bytes is not None and budgets.get(device.id, 0) > device.memory_bytes
               for device in problem.devices)
