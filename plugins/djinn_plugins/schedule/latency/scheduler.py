"""The scheduler ``latency``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.colocation import Homes
from djinn_plugins.schedule.completion import complete, settled
from djinn_plugins.schedule.latency.listing import ListPass, average_ranks, outlook
from djinn_plugins.schedule.latency.searching import Search, SearchState, improved, planned
from djinn_plugins.schedule.memory_budget import Room, is_over
from djinn_plugins.schedule.memory_fallback import within_memory
from djinn_plugins.schedule.problem import Problem
from djinn_plugins.schedule.schedule import DeviceInfo, ExecutionSchedule

_SEARCHED_GROUPS = 12
_SEARCHED_NODES = 40
_SEARCH_STEPS = 2_000
_IMPROVED_NODES = 300
_IMPROVING = 6_000
_COMPARED_NODES = 5_000
WORTH_SAVING = 0.1
"""Fraction of the time that spreading has to save."""


class LatencyScheduler:
    """Schedules a graph for the shortest completion time.

    Several methods are tried, and the fastest by prediction is used: everything on one device; list scheduling by
    upward ranks, with gaps filled; the same with a look ahead; then small changes to the best of them, and for small
    graphs a search. The effort depends only on the graph's size, so the same graph gets the same schedule.

    Weights and caches stay on their devices. If the schedule places them, it chooses devices with enough memory, and
    the nodes that read them follow.
    """

    name = "latency"

    def schedule(self, graph: Graph, devices: Sequence[DeviceInfo]) -> ExecutionSchedule:
        """Schedule ``graph`` on ``devices``.

        Raises:
            ScheduleError: There is no device, or a node concerns storages that several devices hold.
        """
        return within_memory(graph, devices, self.name, self._made)

    def _made(self, problem: Problem, homes: Homes, is_strict: bool) -> ExecutionSchedule:
        spread = min(_plans(problem, homes, is_strict=is_strict), key=lambda plan: plan.seconds)
        together = min(_together(problem, homes, is_strict=is_strict), key=lambda plan: plan.seconds, default=spread)
        best = min(spread, together, key=lambda plan: plan.seconds)
        if len(problem.nodes) <= _IMPROVED_NODES:
            better = _searched(problem, homes, best)
            if not _is_worth_it(problem, better, together):
                better = together
            made = complete(problem, better.place, better.order, scheduler=self.name, homes=homes)
            if better in (best, together) or not is_over(problem, made.budgets):
                return made
        elif not _is_worth_it(problem, best, together):
            best = together
        return complete(problem, best.place, best.order, scheduler=self.name, homes=homes)


def _plans(problem: Problem, homes: Homes, *, is_strict: bool) -> Iterator[SearchState]:
    count = len(problem.nodes)
    ranks = average_ranks(problem, homes)
    passed = ListPass(problem, homes, Room(problem, homes, is_strict=is_strict))
    order = passed.follow(ranks)
    if count > _COMPARED_NODES:
        yield SearchState(0.0, passed.place, order)
        return
    yield planned(problem, homes, passed.place, order)
    if count <= _IMPROVED_NODES:
        ahead = outlook(problem, homes)
        passed = ListPass(problem, homes, Room(problem, homes, is_strict=is_strict), ahead)
        order = passed.follow(ranks)
        yield planned(problem, homes, passed.place, order)


def _together(problem: Problem, homes: Homes, *, is_strict: bool) -> Iterator[SearchState]:
    """Place everything on one device, except for values that other devices hold."""
    count = len(problem.nodes)
    if count > _COMPARED_NODES:
        return
    kinds = problem.kinds_of_devices()
    for device in range(len(problem.devices)):
        if kinds[device] == device or device in problem.held.values():
            room = Room(problem, homes, is_strict=is_strict)
            place = settled(homes, [device] * count)
            if _takes(room, homes, place):
                yield planned(problem, homes, place, range(count))


def _is_worth_it(problem: Problem, spread: SearchState, together: SearchState) -> bool:
    """Whether spreading saves enough: an unnecessary division cuts programs.

    If devices hold values, the graph is part of a larger one, and other parts will read its results: then the saving
    must at least cover the cost of bringing the results together again.
    """
    if not any(device.held_bytes for device in problem.devices):
        return spread.seconds <= together.seconds
    width = len(problem.devices)
    latency_s = min(line[0] for index, line in enumerate(problem.lines) if index % (width + 1))
    return together.seconds - spread.seconds >= max(WORTH_SAVING * together.seconds, 2 * latency_s)


def _takes(room: Room, homes: Homes, place: Sequence[int]) -> bool:
    """Whether devices have enough memory for the placed groups."""
    for group in dict.fromkeys(homes.group):
        if not room.fits(group, place[group]):
            return False
        room.take(group, place[group])
    return True


def _searched(problem: Problem, homes: Homes, best: SearchState) -> SearchState:
    count = len(problem.nodes)
    best = improved(problem, homes, best, _IMPROVING)
    if count <= _SEARCHED_NODES and len(set(homes.group)) <= _SEARCHED_GROUPS:
        best = Search(problem, homes).run(best, _SEARCH_STEPS)
    return best
