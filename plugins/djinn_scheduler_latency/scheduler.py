"""The scheduler ``latency``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from djinn_lib_graph.graph import Graph
from djinn_lib_schedule.colocation import Homes
from djinn_lib_schedule.completion import complete, settled
from djinn_lib_schedule.memory_budget import Room, is_over
from djinn_lib_schedule.memory_fallback import within_memory
from djinn_lib_schedule.problem import Problem
from djinn_lib_schedule.schedule import DeviceInfo, ExecutionSchedule

from djinn_scheduler_latency.listing import ListPass, average_ranks, outlook
from djinn_scheduler_latency.searching import Plan, Search, improved, planned

_SEARCHED_GROUPS = 12
_SEARCHED_NODES = 40
_SEARCH_STEPS = 2_000
_IMPROVED_NODES = 300
_IMPROVING = 6_000
_COMPARED_NODES = 5_000
WORTH_SAVING = 0.1
"""Part of the time that spreading has to save."""


class LatencyScheduler:
    """Runs a graph so that it is done as soon as possible.

    Several ways are tried and the quickest by prediction is taken: everything on one device; list scheduling by upward
    ranks, with gaps filled; the same with a look ahead; then small changes to the best of them, and for small graphs
    a search. How much is tried depends on the graph's size only, so the same graph gets the same schedule.

    Weights and caches stay where they are. Where they are placed by the schedule, they are placed where there is
    memory, and what reads them follows.
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


def _plans(problem: Problem, homes: Homes, *, is_strict: bool) -> Iterator[Plan]:
    count = len(problem.nodes)
    ranks = average_ranks(problem, homes)
    passed = ListPass(problem, homes, Room(problem, homes, is_strict=is_strict))
    order = passed.follow(ranks)
    if count > _COMPARED_NODES:
        yield Plan(0.0, passed.place, order)
        return
    yield planned(problem, homes, passed.place, order)
    if count <= _IMPROVED_NODES:
        ahead = outlook(problem, homes)
        passed = ListPass(problem, homes, Room(problem, homes, is_strict=is_strict), ahead)
        order = passed.follow(ranks)
        yield planned(problem, homes, passed.place, order)


def _together(problem: Problem, homes: Homes, *, is_strict: bool) -> Iterator[Plan]:
    """Leave everything on one device that nothing holds on another."""
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


def _is_worth_it(problem: Problem, spread: Plan, together: Plan) -> bool:
    """Say whether spreading saves enough: what has no need to be on several devices cuts programs.

    Where devices hold something, the graph is a piece of something larger, and others will read what it makes: then at
    least as much must be saved as it takes to bring that together again.
    """
    if not any(device.held_bytes for device in problem.devices):
        return spread.seconds <= together.seconds
    width = len(problem.devices)
    latency_s = min(line[0] for index, line in enumerate(problem.lines) if index % (width + 1))
    return together.seconds - spread.seconds >= max(WORTH_SAVING * together.seconds, 2 * latency_s)


def _takes(room: Room, homes: Homes, place: Sequence[int]) -> bool:
    """Say whether devices have room for groups that are placed."""
    for group in dict.fromkeys(homes.group):
        if not room.fits(group, place[group]):
            return False
        room.take(group, place[group])
    return True


def _searched(problem: Problem, homes: Homes, best: Plan) -> Plan:
    count = len(problem.nodes)
    best = improved(problem, homes, best, _IMPROVING)
    if count <= _SEARCHED_NODES and len(set(homes.group)) <= _SEARCHED_GROUPS:
        best = Search(problem, homes).run(best, _SEARCH_STEPS)
    return best
