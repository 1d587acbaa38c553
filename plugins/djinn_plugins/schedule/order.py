"""Orders nodes whose devices are known."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from djinn_plugins.schedule.problem import Problem


def ranks(problem: Problem, seconds: Sequence[float], moving: Callable[[int, int], float]) -> list[float]:
    """Predict, for each node, the time from its start to the end of everything that depends on it.

    Args:
        problem: The graph and its devices.
        seconds: How long each node takes.
        moving: How long it takes to move a value to a node that reads it.

    Source:
        Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous
        Computing", IEEE TPDS 13(3), 2002: upward ranks.
    """
    found = [0.0] * len(seconds)
    maker = problem.maker
    for node in range(len(found) - 1, -1, -1):
        rank = found[node] = found[node] + seconds[node]
        for earlier in problem.before[node]:
            found[earlier] = max(found[earlier], rank)
        for value in problem.reads[node]:
            earlier = maker[value]
            if earlier >= 0:
                through = rank + moving(value, node)
                found[earlier] = max(found[earlier], through)
    return found


def ranks_of(problem: Problem, place: Sequence[int]) -> list[float]:
    """Rank placed nodes; nodes that other devices wait for rank higher, by the transfer time."""
    maker, moving_s = problem.maker, problem.moving_s

    def moving(value: int, node: int) -> float:
        source, target = place[maker[value]], place[node]
        return 0.0 if source == target else moving_s(value, source, target)

    return ranks(problem, [problem.seconds(node, device) for node, device in enumerate(place)], moving)


def arranged(problem: Problem, rank: Sequence[float]) -> list[int]:
    """Order nodes by priority, then by rank, then by the order of recording.

    A node inherits the priority of the nodes that depend on it.
    """
    missing = [len(before) for before in problem.before]
    priority = list(problem.priority)
    for node in range(len(priority) - 1, -1, -1):
        for earlier in problem.before[node]:
            priority[earlier] = max(priority[earlier], priority[node])
    keys = [(-priority[node], -rank[node], node) for node in range(len(priority))]
    ready = [keys[node] for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for later in problem.after[node]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, keys[later])
    return order
