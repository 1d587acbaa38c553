"""Determines which nodes must be on the same device, and on which."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from djinn.errors import ScheduleError
from djinn_plugins.schedule.problem import NOWHERE, Problem
from djinn_plugins.schedule.semantics import meaning_of


@attrs.frozen
class Homes:
    """Groups of nodes that run on one device: those that create a storage, write it, or make views of it."""

    group: Sequence[int]
    """By node: the group's first node."""
    pinned: Sequence[int]
    """By group: the device that holds a storage of it, else the one with most of the weights that it reads, or
    `NOWHERE`.
    """
    storages: dict[int, int]
    """By storage from outside that nodes write or view: their group."""
    away: dict[int, tuple[int, ...]]
    """By node: values that it writes although their home is on another device."""

    def members(self) -> dict[int, list[int]]:
        """List the nodes of each group."""
        found: dict[int, list[int]] = {}
        for node, group in enumerate(self.group):
            found.setdefault(group, []).append(node)
        return found


def find_homes(problem: Problem) -> Homes:
    """Find the nodes that must be on one device.

    A node that writes storages which several devices hold runs where most of their bytes are, and the other storages
    are written back.

    Raises:
        ScheduleError: A node can run nowhere, because it makes views of storages that several devices hold.
    """
    count = len(problem.nodes)
    parent = list(range(count + len(problem.values)))
    pin = [NOWHERE] * len(parent)
    for storage, device in problem.held.items():
        pin[count + storage] = device

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(one: int, other: int) -> None:
        one, other = find(one), find(other)
        if one != other:
            low, high = min(one, other), max(one, other)
            parent[high] = low
            pin[low] = max(pin[low], pin[high])

    root, away = problem.root, dict[int, tuple[int, ...]]()
    for node in range(count):
        made, written = problem.makes[node], problem.writes[node]
        wanted = {count + root[value] for value in made}
        wanted.update(count + root[value] for value in written)
        pins = {pin[find(item)] for item in wanted} - {NOWHERE}
        chosen = _choose(problem, node, {item: pin[find(item)] for item in wanted}) if len(pins) > 1 else NOWHERE
        for item in wanted:
            if chosen == NOWHERE or pin[find(item)] in {NOWHERE, chosen}:
                join(node, item)
        if chosen != NOWHERE:
            away[node] = tuple(value for value in written if pin[find(count + root[value])] != chosen)
    _join_by_meaning(problem, find, join, pin)
    group = [find(node) for node in range(count)]
    _pin_to_weights(problem, group, pin)
    storages: dict[int, int] = {}
    for node in range(count):
        for value in (*problem.makes[node], *problem.writes[node]):
            if problem.maker[root[value]] == NOWHERE:
                storages.setdefault(root[value], group[node])
    return Homes(group, pin[:count], storages, away)


def _pin_to_weights(problem: Problem, group: Sequence[int], pin: list[int]) -> None:
    """Place nodes that read weights and caches where most of these are held, unless they must be on another device."""
    held: dict[int, dict[int, int]] = {}
    for node, reads in enumerate(problem.reads):
        for value in reads:
            device = problem.held.get(problem.root[value], NOWHERE)
            if problem.stays[value] and device != NOWHERE and pin[group[node]] == NOWHERE:
                at = held.setdefault(group[node], {})
                at[device] = at.get(device, 0) + problem.size[value]
    for leader, at in held.items():
        pin[leader] = max(sorted(at), key=at.__getitem__)


def _choose(problem: Problem, node: int, pins: dict[int, int]) -> int:
    """Choose the device of a node that concerns storages of several devices."""
    count, root = len(problem.nodes), problem.root
    views = {pins[count + root[value]] for value in problem.makes[node]} - {NOWHERE}
    weight: dict[int, float] = {}
    for value in problem.writes[node]:
        storage = root[value]
        device = pins[count + storage]
        if device != NOWHERE:
            # A storage accessed through several values cannot be written away from home: copies share no memory.
            shared = sum(root[other] == storage for other in problem.reads[node]) > 1
            weight[device] = weight.get(device, 0.0) + (float("inf") if shared else problem.size[value])
    candidates = views or set(weight)
    chosen = max(sorted(candidates), key=lambda device: weight.get(device, 0.0))
    if len(views) > 1 or any(other != chosen and heavy == float("inf") for other, heavy in weight.items()):
        raise ScheduleError(
            f"{problem.nodes[node].id} ({problem.nodes[node].operation}) concerns storages that are held on several "
            "devices, and can run on none of them.",
            hint="Bring its operands to one device first: x.to(device) makes a copy.")
    return chosen


def _join_by_meaning(
    problem: Problem, find: Callable[[int], int], join: Callable[[int, int], None], pin: Sequence[int]
) -> None:
    """Join nodes that the annotations say belong together, unless they must be on different devices."""
    number: dict[str, int] = {}
    for node, known in enumerate(problem.nodes):
        number[known.id] = node
        meaning = meaning_of(known)
        if meaning is not None and meaning.must_colocate is not None:
            other = number.get(meaning.must_colocate, node)
            if NOWHERE in {pin[find(node)], pin[find(other)]} or pin[find(node)] == pin[find(other)]:
                join(node, other)
