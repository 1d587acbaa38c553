"""Placement by phase: the first server writes, and prompts are read wherever that takes the least time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from djinn.errors import OutOfMemoryError
from djinn.ir.phase import ExecutionPhase
from djinn.ir.tape import Node
from djinn.kinds import Connection
from djinn_plugins.common.memory.recently_used import RecentlyUsed
from djinn_plugins.fleet.loading import are_loads
from djinn_plugins.fleet.loads import FleetLoads
from djinn_plugins.fleet.placement import MAX_SCHEDULES, ROOM_FOR_ACTIVATIONS, FleetMember, JointPlacement
from djinn_plugins.graph.from_tape import graph_of
from djinn_plugins.graph.graph import Graph
from djinn_plugins.schedule.costs import CostModel, waiting_s
from djinn_plugins.schedule.placing import Placed, ValueDirectory
from djinn_plugins.schedule.schedule import DeviceInfo, DeviceProfile, LinkProfile

__all__ = ("FIRST", "PhasePlacement", "PromptFinder")

FIRST = 0
"""The executor that holds the session's values, and writes."""
FEW = 8
"""Most positions of one step that writes: speculative drafts are checked together."""
MAX_SILENT = 500
"""After so many operations that do not say how many positions they are for, no prompt is being read any more."""
MAX_CREDITS = 10_000
_ATTENTION_RANK = 4


class PromptFinder:
    """Divides tape into operations that read prompts, and others. Earlier pieces decide for the next one, too.

    A lookup of embeddings and attention say for how many positions a step is; the operations between them say nothing.

    Attributes:
        is_reading: Whether the last operation reads a prompt.
    """

    def __init__(self) -> None:
        self.is_reading = False
        self._silent = 0

    def parts(self, nodes: Sequence[Node]) -> Iterator[tuple[bool, list[Node]]]:
        """Divide a piece of tape; each part comes with whether it reads a prompt."""
        for is_reading, part in itertools.groupby(nodes, self._reads):
            yield is_reading, list(part)

    def _reads(self, node: Node) -> bool:
        positions = _positions(node)
        self._silent = 0 if positions else self._silent + 1
        if positions:
            self.is_reading = positions > FEW
        elif self._silent > MAX_SILENT:
            self.is_reading = False
        return self.is_reading


def _positions(node: Node) -> int:
    """Return for how many positions an operation looks up embeddings, or attends; 0 if it does neither."""
    signature = node.signature
    sizes = [spec.size for spec in signature.operands]
    if signature.template.operator == "aten::embedding":
        return sizes[1][-1] if sizes[1] else 1
    if signature.phase is ExecutionPhase.LLM_DECODE:
        return 1
    if signature.phase is not None and len(sizes[0]) == _ATTENTION_RANK and sizes[0][-2] > FEW:
        return sizes[0][-2]
    return 0


class PhasePlacement(JointPlacement):
    """Placement by phase: all executors form one device, whose values the first one holds.

    The first executor does all work but prompts. A prompt is read by another one where that takes less time, by the
    speed and the load of each, with everything that has to move there and back. Its results, such as a KV
    cache, go directly to the first executor when it reads them.

    Weights that another executor lacks are sent to it when the time that their absence has cost so far exceeds the time
    that sending them takes.

    Args:
        members: The executors.
        annotate: Adds semantic annotations to a graph.
        loads: Knows how busy the executors are.
    """

    def __init__(
        self, members: Sequence[FleetMember], annotate: Callable[[Graph], Graph], loads: FleetLoads,
    ) -> None:
        super().__init__(members, annotate, loads)
        self._prompts = PromptFinder()
        self._computing = RecentlyUsed[tuple[object, ...], tuple[float, ...]](MAX_SCHEDULES)
        self._credits: dict[int, float] = {}
        """By value: seconds that other executors would have saved so far if they had had it."""

    def add(self, connection: Connection) -> None:
        """Let prompts be read by another executor, too."""
        super().add(connection)
        self._computing.clear()

    def learn(self, executor: int, profile: DeviceProfile, home_link: LinkProfile,
              links: Mapping[int, LinkProfile]) -> None:
        """Record the measured speed of an executor and its links; later prompts are placed accordingly."""
        super().learn(executor, profile, home_link, links)
        self._computing.clear()

    def house(self, size_bytes: int, device: torch.device | None, where: ValueDirectory) -> int:
        """Choose the first executor.

        Raises:
            OutOfMemoryError: It has no room.
        """
        if self._pinned is not None:
            return self._pinned
        left = self._left(FIRST, 1.0, where.held_bytes)
        if size_bytes > left:
            raise OutOfMemoryError(
                f"A tensor of {size_bytes:,} bytes does not fit on the first server, which holds all values with "
                f"placement='phases': {max(0, int(left)):,} of {self._members[FIRST].memory_bytes:,} bytes are left.",
                hint="Name a server with more memory first, or let placement='automatic' split the model.")
        return FIRST

    def place(self, nodes: Sequence[Node], gone: set[int], where: ValueDirectory) -> Placed:
        """Let the first executor do everything but prompts, and these where they take the least time."""
        if self._pinned is not None:
            return [(node, self._pinned) for node in nodes]
        if are_loads(nodes):
            return self._loaded(nodes, where)
        placed: Placed = []
        was_reading = self._prompts.is_reading
        for is_reading, part in self._prompts.parts(nodes):
            if is_reading and not was_reading:
                self._loads.renew()
            was_reading = is_reading
            executor = self._reader(part, gone, where) if is_reading else FIRST
            placed += [(node, executor) for node in part]
        return placed

    def _loaded(self, nodes: Sequence[Node], where: ValueDirectory) -> Placed:
        """Load stored tensors on the first executor, and on all others with room: they read their own files."""
        size_bytes = sum(spec.size_bytes for node in nodes for spec in node.signature.results if spec is not None)
        others = [index for index in range(len(self._members)) if index != FIRST
                  and size_bytes <= self._left(index, 1 - ROOM_FOR_ACTIVATIONS, where.held_bytes)]
        return [(node, executor) for node in nodes for executor in (FIRST, *others)]

    def _reader(self, part: Sequence[Node], gone: set[int], where: ValueDirectory) -> int:
        """Choose the executor on which a part of reading a prompt takes the least time."""
        inputs, kept_bytes = _traffic(part, gone)
        times, missing = [], []
        for executor, computing_s in enumerate(self._seconds(part)):
            homes = {number: home for number in inputs if not where.is_at(number, executor)
                     and (home := where.home_of(number)) is not None}
            time_s = computing_s + waiting_s(computing_s, self._loads.of(executor))
            if executor != FIRST:
                needed = sum(map(inputs.__getitem__, homes)) + kept_bytes
                time_s += self._link(executor, FIRST).seconds(kept_bytes)
                time_s = time_s if needed <= self._left(executor, 1.0, where.held_bytes) else math.inf
            times.append(time_s)
            missing.append({number: self._link(home, executor).seconds(inputs[number])
                            for number, home in homes.items()})
        return self._cheapest(times, missing)

    def _cheapest(self, times: Sequence[float], missing: Sequence[Mapping[int, float]]) -> int:
        """Choose the executor with the least time, counting only transfers that no earlier choice was charged for."""
        owed = [sum(max(0.0, took_s - self._credits.get(number, 0.0)) for number, took_s in lacks.items())
                for lacks in missing]
        executors = range(len(times))
        chosen = min(executors, key=lambda executor: (times[executor] + owed[executor], executor))
        wanted = min(executors, key=lambda executor: (times[executor], executor))
        for number in missing[chosen]:
            self._credits.pop(number, None)
        saved_s, sending_s = times[chosen] + owed[chosen] - times[wanted], sum(missing[wanted].values())
        if chosen != wanted and sending_s:
            if len(self._credits) > MAX_CREDITS:
                self._credits.clear()
            for number, took_s in missing[wanted].items():
                self._credits[number] = self._credits.get(number, 0.0) + saved_s * took_s / sending_s
        return chosen

    def _link(self, source: int, target: int) -> LinkProfile:
        return self._members[source].links.get(self._members[target].id, LinkProfile())

    def _seconds(self, part: Sequence[Node]) -> tuple[float, ...]:
        """Predict how long a part takes on each executor while that is idle; determined once for similar parts."""
        size_bytes = sum(spec.size_bytes for node in part for spec in node.signature.results if spec is not None)
        key = (*(node.signature.template_number for node in part), size_bytes.bit_length())
        return self._computing.use(key, partial(self._predicted, part))

    def _predicted(self, part: Sequence[Node]) -> tuple[float, ...]:
        graph = self._annotate(graph_of(part))
        costs = CostModel([DeviceInfo(member.id, profile=member.profile) for member in self._members])
        return tuple(sum(costs.node_seconds(node, member.id) for node in graph.nodes()) for member in self._members)


def _traffic(part: Sequence[Node], gone: set[int]) -> tuple[dict[int, int], int]:
    """Return the bytes of each value that a part reads from outside; and the bytes of its results that are kept."""
    made: set[int] = set()
    inputs: dict[int, int] = {}
    kept_bytes = 0
    for node in part:
        signature = node.signature
        outside = [(slot.number, spec) for slot, spec in zip(node.inputs, signature.operands, strict=True)
                   if slot.number not in made]
        inputs.update((number, spec.size_bytes) for number, spec in outside)
        kept_bytes += sum(signature.operands[index].reach_bytes for index in signature.writes
                          if node.inputs[index].number not in made)
        for slot, spec, alias in zip(node.outputs, signature.results, signature.aliases, strict=False):
            made.add(slot.number)
            if spec is not None and alias < 0 and slot.number not in gone:
                kept_bytes += spec.size_bytes
    return inputs, kept_bytes
