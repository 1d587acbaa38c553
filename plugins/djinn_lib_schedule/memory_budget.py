"""Which device has room for what, while nodes are being placed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from djinn_lib_schedule.colocation import Homes
from djinn_lib_schedule.problem import NOWHERE, Problem


class Room:
    """Keeps account of memory by groups of nodes that must be together.

    Args:
        problem: The graph and its devices.
        homes: The groups.
        is_strict: Whether to count all that a group reads or makes, as if nothing were ever let go, rather than only
            what is to be placed on the device of the node that first reads it.
    """

    def __init__(self, problem: Problem, homes: Homes, *, is_strict: bool) -> None:
        self._left = problem.room()
        self._is_strict = is_strict
        self._size = problem.size
        self._new: dict[int, set[int]] = {}
        self._placed: set[int] = set()
        self.is_bounded = any(left != float("inf") for left in self._left)
        """Whether there is anything to count."""
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
        """Say whether a device has room for a group."""
        return not self.is_bounded or self.needed(group) <= self._left[device]

    def fits_all(self, groups: Iterable[int], device: int) -> bool:
        """Say whether a device has room for several groups."""
        if not self.is_bounded:
            return True
        if self._is_strict:
            return sum(map(self.needed, groups)) <= self._left[device]
        new = {value for group in groups for value in self._new.get(group, ())} - self._placed
        return sum(self._size[value] for value in new) <= self._left[device]

    def roomiest(self) -> int:
        """Return the device that has most room."""
        return max(range(len(self._left)), key=lambda device: (self._left[device], -device))

    def take(self, group: int, device: int) -> None:
        """Place a group."""
        if self.is_bounded and group in self._new:
            self._left[device] -= self.needed(group)
            if not self._is_strict:
                self._placed |= self._new[group]
            del self._new[group]


def is_over(problem: Problem, budgets: Mapping[str, int]) -> bool:
    """Say whether a device would hold more than its memory."""
    return any(device.memory_bytes is not None and budgets.get(device.id, 0) > device.memory_bytes
               for device in problem.devices)
