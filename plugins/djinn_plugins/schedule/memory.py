"""Predicts how much memory a schedule needs at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from djinn_plugins.schedule.problem import NOWHERE, Problem
from djinn_plugins.schedule.schedule import ExecutionSchedule


def peak_bytes(problem: Problem, schedule: ExecutionSchedule) -> Mapping[str, int]:
    """Predict the largest number of bytes that each device holds at once, including bytes held before.

    Storages on their home device count from the node that creates them, or from the beginning if they are placed there,
    to the last node that uses them, or to the end if they outlive the graph. Copies count from the first node that
    reads them there to the last. Inputs and results of a node exist at the same time.
    """
    position = {name: index for index, name in enumerate(schedule.order)}
    index = {device.id: number for number, device in enumerate(problem.devices)}
    spans: dict[tuple[int, int, bool], list[int]] = {}
    """By storage or value, device, and whether it is a copy: size, first and last position."""
    last = len(position) - 1
    _Spans(problem, schedule, position, index, spans).collect()
    changes: list[dict[int, int]] = [{} for _ in problem.devices]
    for (_, place, _), (size, begin, end) in spans.items():
        changes[place][begin] = changes[place].get(begin, 0) + size
        if end < last:
            changes[place][end + 1] = changes[place].get(end + 1, 0) - size
    found = {}
    for device, change in zip(problem.devices, changes, strict=True):
        held = most = device.held_bytes
        for moment in sorted(change):
            held += change[moment]
            most = max(most, held)
        found[device.id] = most
    return found


class _Spans:
    def __init__(
        self, problem: Problem, schedule: ExecutionSchedule, position: Mapping[str, int], index: Mapping[str, int],
        spans: dict[tuple[int, int, bool], list[int]],
    ) -> None:
        self._problem = problem
        self._schedule = schedule
        self._position = position
        self._index = index
        self._spans = spans
        self._home: dict[int, int] = dict(problem.held)

    def _touch(self, value: int, device: int, moment: int) -> None:
        problem = self._problem
        storage = problem.root[value]
        if self._home.get(storage) == device:
            key, size = (storage, device, False), problem.size[storage]
            if storage in problem.held:
                return
        elif device in problem.copies.get(value, ()):
            return
        else:
            key, size = (value, device, True), problem.size[value]
        span = self._spans.get(key)
        if span is None:
            self._spans[key] = [size, moment, moment]
        else:
            span[1], span[2] = min(span[1], moment), max(span[2], moment)

    def collect(self) -> None:
        problem, schedule, index = self._problem, self._schedule, self._index
        number = {name: value for value, name in enumerate(problem.values)}
        last = len(schedule.order) - 1
        names = [node.id for node in problem.nodes]
        for value, maker in enumerate(problem.maker):
            if maker == NOWHERE:
                place = schedule.placements.get(problem.values[value], "")
                self._home.setdefault(problem.root[value], index.get(place, 0))
            elif problem.root[value] == value:
                self._home[value] = index[schedule.devices[names[maker]]]
        for value, maker in enumerate(problem.maker):
            if maker == NOWHERE:
                self._touch(value, self._home[problem.root[value]], 0)
            if problem.outlives[value]:
                self._touch(value, self._home[problem.root[value]], last)
        for node, name in enumerate(names):
            moment = self._position[name]
            places: Sequence[str] = (schedule.devices[name], *schedule.replicas.get(name, ()))
            for place in places:
                device = index[place]
                for value in problem.reads[node]:
                    self._touch(value, device, moment)
                for value in problem.makes[node]:
                    if place == schedule.devices[name] or not problem.is_view[node]:
                        self._touch(value, device, moment)
        for transfer in schedule.transfers:
            moment = self._position.get(transfer.after, 0)
            self._touch(number[transfer.value], index[transfer.source], moment)
