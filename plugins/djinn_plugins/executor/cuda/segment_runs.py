"""Runs a program as segments that are recorded, and steps between them.

Values that flow from a segment to later steps of the same run stay in the memory of the recording. What the program
keeps is copied out at the end of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from djinn.ir.program import Program
from djinn.wire.messages import Poisoned
from djinn_plugins.common.calls.binding import BoundCall
from djinn_plugins.common.kinds.executor import Report
from djinn_plugins.common.operators.operators import operator_named
from djinn_plugins.executor.cuda.cuda_graphs import CapturedGraph, NotPlayedError, Shelf, moved_out
from djinn_plugins.executor.cuda.graph_eligibility import GraphStage, digest_of_numbers, forms_of, suits
from djinn_plugins.executor.cuda.segments import OutlinedProgram, RecordableSegment, StepHistory, cut
from djinn_plugins.executor.cuda.signatures import KnownSignature, Signatures, Terms
from djinn_plugins.executor.torch.codegen import Compiled, straight_line
from djinn_plugins.executor.torch.executor import probabilities_of
from djinn_plugins.executor.torch.interpreter import interpret

__all__ = ("SegmentPlayer", "SegmentedRuns")

OBSERVED_RUNS = 2
"""Runs that are compared before a program is cut; those before them often differ, as the first token after a prompt."""
FIRST_RUNS = 1
"""Runs before them."""
MAX_CUTS = 3
"""How often a program is cut; between that, steps are found that do not repeat after all."""
PATIENCE_RUNS = 16
"""Number of runs of a segment without a recording after which its program is cut again."""


class _Now:
    """The run that is in progress."""

    def __init__(self) -> None:
        self.settings: tuple[Any, ...] = ()
        self.stop: Sequence[BaseException] = ()
        self.in_place: set[int] = set()
        """Results that lie in the memory of a recording, and are the same tensors in each run; by ``id``."""
        self.storages: set[int] = set()
        """Storages of the recordings that were played."""
        self.recorded = 0
        """How often the segments up to now have been recorded, in all runs."""

    def begin(self, settings: tuple[Any, ...], stop: Sequence[BaseException]) -> None:
        self.settings, self.stop, self.recorded = settings, stop, 0
        self.in_place.clear()
        self.storages.clear()


class SegmentPlayer:
    """Runs one segment, and records it.

    Args:
        segment: The segment.
        flowing: By input: the earlier segment that makes it.
        now: The run that is in progress.
        device: The device on which it runs.
        shelf: The recordings of all programs.

    Attributes:
        segment: The segment.
        is_played: Whether its last run was a recording.
        idle_runs: Number of runs since the last one that was.
        is_refused: Whether it is not recorded any more.
    """

    def __init__(
        self, segment: RecordableSegment, flowing: Mapping[int, SegmentPlayer], now: _Now, device: torch.device,
        shelf: Shelf,
    ) -> None:
        self.segment = segment
        self.is_played = False
        self.idle_runs = 0
        self.is_refused = False
        self._recorded = self._recorded_before = 0
        self._flowing = flowing
        self._now = now
        self._device = device
        self._shelf = shelf
        self._signatures = Signatures(segment.program, segment.calls, device, shelf)
        self._function = straight_line(segment.program, segment.calls)
        self._probabilities = probabilities_of(segment.program, segment.calls)

    def __call__(self, inputs: list[Any], numbers: list[Any]) -> list[Any]:
        """Run it."""
        if self._now.recorded != self._recorded_before:
            # Intermediate values may lie where the new results of an earlier segment lie.
            self._signatures.close()
            self._recorded_before = self._now.recorded
        self.is_played = False
        results = self._run(inputs, numbers)
        self._now.recorded += self._recorded
        return results

    def _run(self, inputs: list[Any], numbers: list[Any]) -> list[Any]:
        if self.is_refused or not self._shelf.recorder.is_usable or any(
                numbers[index] for index in self._probabilities):
            return self._function(inputs, numbers, self._now.stop)
        terms: Terms = digest_of_numbers(numbers), self._now.settings
        recording = self._signatures.found(terms, inputs)
        if recording is not None:
            with suppress(NotPlayedError):
                return self._play(recording, inputs)
            return self._function(inputs, numbers, self._now.stop)
        self.idle_runs += 1
        forms = forms_of(inputs, self._device)
        if forms is None or self._now.stop:
            return self._function(inputs, numbers, self._now.stop)
        return self._watch(self._signatures.look_up(terms, forms), inputs, numbers)

    def _play(self, recording: CapturedGraph, inputs: list[Any]) -> list[Any]:
        self._now.storages.update(recording.storages)
        results = self._shelf.play(recording, inputs, None)
        self.is_played, self.idle_runs = True, 0
        self._now.in_place.update(recording.fixed)
        return results

    def _watch(self, known: KnownSignature, inputs: list[Any], numbers: list[Any]) -> list[Any]:
        flowing = {index for index, player in self._flowing.items() if not player.is_refused}
        stage = known.candidate.observe(inputs, flowing)
        if stage is GraphStage.RECORD:
            loose = {index for index in flowing if id(inputs[index]) not in self._now.in_place}
            waits = any(not self._flowing[index].is_played for index in loose)
            if not waits and known.candidate.copies(loose):
                recording = self._signatures.record(known, inputs, numbers)
                if recording is not None and recording.fits(inputs):
                    self._recorded += 1
                    with suppress(NotPlayedError):
                        return self._play(recording, inputs)
        self.is_refused = known.candidate.is_hopeless
        if stage is not GraphStage.REHEARSE:
            return self._function(inputs, numbers, self._now.stop)
        try:
            return self._signatures.rehearse(
                known, inputs, lambda calls: straight_line(self.segment.program, calls)(inputs, numbers))
        except Exception:
            known.candidate.refuse()
            raise


class SegmentedRuns:
    """The runs of one program.

    Args:
        program: The program.
        calls: Its bound templates.
        device: The device on which it runs.
        shelf: The recordings of all programs.
        single: Steps that are never part of a segment.
        least_steps: Minimum number of steps of a segment.
        relieve: Frees memory.

    Attributes:
        players: Its segments, in order; none before it was cut.
    """

    def __init__(
        self, program: Program, calls: Sequence[BoundCall], device: torch.device, shelf: Shelf,
        single: frozenset[int], least_steps: int, relieve: Callable[[], bool],
    ) -> None:
        self.players: list[SegmentPlayer] = []
        self._program = program
        self._calls = calls
        self._device = device
        self._shelf = shelf
        self._least_steps = least_steps
        self._whole = Compiled(program, calls, relieve)
        self._relieve = relieve
        self._now = _Now()
        suited = [suits(operator_named(template.operator)) and not call.draws
                  for template, call in zip(program.templates, calls, strict=True)]
        self._suits = [suited[step.template] and position not in single for position, step in enumerate(program.steps)]
        self._history = StepHistory(program, calls, device)
        self._outlined: OutlinedProgram | None = None
        self._observed = 0
        self._cuts = 0

    @property
    def is_worthwhile(self) -> bool:
        """Whether there may be segments."""
        return bool(cut(self._program, self._calls, self._suits, least_steps=self._least_steps))

    def run(
        self, inputs: list[Any], numbers: Sequence[Any], report: Report, stop: Sequence[BaseException]
    ) -> list[Any]:
        """Run once, under the executor's lock, in inference mode, with the session's random numbers."""
        if any(type(value) is Poisoned for value in inputs):
            return interpret(self._program, self._calls, inputs, numbers, report, relieve=self._relieve, stop=stop)
        if self._outlined is None and self._cuts < MAX_CUTS:
            self._observed += 1
            if self._observed <= FIRST_RUNS:
                return interpret(self._program, self._calls, inputs, numbers, report, relieve=self._relieve, stop=stop)
            if self._observed <= FIRST_RUNS + OBSERVED_RUNS:
                program, calls = self._history.watched(numbers)
                return interpret(program, calls, inputs, numbers, report, relieve=self._relieve, stop=stop)
            self._cut()
        if self._outlined is None:
            return self._whole.run(inputs, numbers, report, stop)
        self._now.begin(self._shelf.recorder.settings(), stop)
        results = self._run(self._outlined, inputs, numbers, report, stop)
        idle = [player for player in self.players if player.idle_runs > PATIENCE_RUNS and not player.is_refused]
        if idle and self._cuts < MAX_CUTS:
            self._outlined, self.players, self._observed = None, [], 0
        for player in idle:
            player.is_refused = True
        return results

    def _run(
        self, outlined: OutlinedProgram, inputs: list[Any], numbers: Sequence[Any], report: Report,
        stop: Sequence[BaseException],
    ) -> list[Any]:
        try:
            results = outlined.function(inputs, numbers, stop)
        except Exception as error:
            step, known = outlined.where(error.__traceback__)
            if step is None:
                raise
            results = self._whole.resume(step, error, known, inputs, numbers, report, stop)
        return moved_out(results, self._now.storages, self._relieve)

    def _cut(self) -> None:
        self._cuts += 1
        repeats = [suited and not varies for suited, varies in zip(self._suits, self._history.varies, strict=True)]
        segments = cut(self._program, self._calls, repeats, least_steps=self._least_steps)
        if not segments:
            self._cuts = MAX_CUTS
            return
        makers: dict[int, SegmentPlayer] = {}
        for segment in segments:
            flowing = {index: makers[operand] for index, operand in enumerate(segment.inputs) if operand in makers}
            player = SegmentPlayer(segment, flowing, self._now, self._device, self._shelf)
            makers |= dict.fromkeys(segment.outputs, player)
            self.players.append(player)
        self._outlined = OutlinedProgram(self._program, self._calls, segments, self.players)
