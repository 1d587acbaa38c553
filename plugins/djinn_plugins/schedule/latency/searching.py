"""Searches: by small changes to a schedule, and over all schedules of a small graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from djinn_plugins.schedule.colocation import Homes
from djinn_plugins.schedule.completion import settled
from djinn_plugins.schedule.order import arranged, ranks_of
from djinn_plugins.schedule.problem import NOWHERE, Problem
from djinn_plugins.schedule.timing import Simulation, makespan


@attrs.frozen
class SearchState:
    """Places and order of nodes, and the resulting time."""

    seconds: float
    place: Sequence[int]
    order: Sequence[int]


def planned(problem: Problem, homes: Homes, place: Sequence[int], order: Sequence[int] | None = None) -> SearchState:
    """Return the time of a plan; without an order, the better of program order and rank order."""
    if order is not None:
        return SearchState(makespan(problem, homes, place, order), place, order)
    orders = (arranged(problem, ranks_of(problem, place)), range(len(place)))
    return min((planned(problem, homes, place, order) for order in orders), key=lambda plan: plan.seconds)


def improved(problem: Problem, homes: Homes, plan: SearchState, effort: int) -> SearchState:
    """Move one group at a time if that completes the graph sooner, until no move helps or the effort is spent.

    Args:
        problem: The graph and its devices.
        homes: Groups of nodes that must be together.
        plan: The initial plan.
        effort: Maximum number of nodes to simulate.
    """
    count, width = len(problem.nodes), len(problem.devices)
    loose = [group for group in homes.members() if homes.pinned[group] == NOWHERE]
    moves = [(group, device) for group in loose for device in range(width)]
    at = failed = 0
    while moves and failed < len(moves) and effort >= 2 * count:
        group, device = moves[at % len(moves)]
        at += 1
        failed += 1
        if plan.place[group] == device:
            continue
        effort -= 2 * count
        place = list(plan.place)
        place[group] = device
        place = settled(homes, place)
        found = min((planned(problem, homes, place, order)
                     for order in (plan.order, arranged(problem, ranks_of(problem, place)))),
                    key=lambda plan: plan.seconds)
        if found.seconds < plan.seconds * (1 - 1e-9):
            plan, failed = found, 0
    return plan


@attrs.define
class _State:
    """A partial schedule."""

    rehearsal: Simulation
    place: list[int]
    order: tuple[int, ...]
    missing: list[int]
    bound: float
    """Lower bound on the completion time of schedules that begin like this."""
    last: float
    """Start time of the last node."""
    least: float
    """Remaining work, on the fastest devices."""


class Search:
    """Enumerates the schedules of a small graph, most promising first, and prunes those that cannot be better.

    Each schedule is visited with its nodes in order of start time, so it occurs only once.
    """

    def __init__(self, problem: Problem, homes: Homes) -> None:
        self._problem = problem
        self._homes = homes
        self._members = homes.members()
        width = len(problem.devices)
        self._least = [min(problem.seconds(node, device) for device in range(width))
                       for node in range(len(problem.nodes))]
        self._tail = [0.0] * len(problem.nodes)
        for node in range(len(problem.nodes) - 1, -1, -1):
            for earlier in problem.before[node]:
                self._tail[earlier] = max(self._tail[earlier], self._tail[node] + self._least[node])
        kinds = problem.kinds_of_devices()
        used = {*problem.held.values(), *(device for at in problem.copies.values() for device in at)}
        self._alike = kinds if problem.is_uniform else list(range(width))
        self._special = used

    def run(self, plan: SearchState, effort: int) -> SearchState:
        """Search for a better plan within a number of steps."""
        problem, homes = self._problem, self._homes
        place = settled(homes, [NOWHERE] * len(problem.nodes))
        begin = _State(Simulation(problem, homes, place), place, (), [len(before) for before in problem.before],
                       0.0, 0.0, sum(self._least))
        states = [begin]
        while states and effort > 0:
            state = states.pop()
            if state.bound >= plan.seconds * (1 - 1e-9):
                continue
            if len(state.order) == len(place):
                plan = planned(problem, homes, state.place, state.order)
                continue
            children = list(self._children(state, plan.seconds))
            effort -= 1 + len(children)
            children.sort(key=lambda child: (-child.bound, -child.last))
            states += children
        return plan

    def _children(self, state: _State, limit: float) -> Iterator[_State]:
        problem = self._problem
        width = len(problem.devices)
        for node, missing in enumerate(state.missing):
            if missing:
                continue
            group = self._homes.group[node]
            for device in self._devices(state, node):
                place = list(state.place)
                rehearsal = state.rehearsal.copy(place)
                if state.place[node] == NOWHERE:
                    for member in self._members[group]:
                        place[member] = device
                begin, end = rehearsal.run(node, device)
                if begin < state.last:
                    continue
                least = state.least - self._least[node]
                bound = max(state.bound, end + self._tail[node], (sum(rehearsal.free) + least) / width)
                if bound >= limit:
                    continue
                left = list(state.missing)
                left[node] = NOWHERE
                for later in problem.after[node]:
                    left[later] -= 1
                yield _State(rehearsal, place, (*state.order, node), left, bound, begin, least)

    def _devices(self, state: _State, node: int) -> list[int]:
        """List the devices on which a node may run; of identical unused devices, only the first."""
        if state.place[node] != NOWHERE:
            return [state.place[node]]
        used = self._special | set(state.rehearsal.home.values()) | set(state.place)
        seen: set[int] = set()
        found = []
        for device, kind in enumerate(self._alike):
            if device in used:
                found.append(device)
            elif kind not in seen:
                seen.add(kind)
                found.append(device)
        return found

