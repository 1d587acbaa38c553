"""Programs that are recorded when they repeat, whole or in segments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from djinn.errors import ProtocolError
from djinn.ir.program import Program
from djinn.wire.messages import Poisoned
from djinn_plugins.common.calls.binding import BoundCall
from djinn_plugins.common.calls.switches import switched
from djinn_plugins.common.kinds.executor import RandomState, Report
from djinn_plugins.executor.cuda.cuda_graphs import NotPlayedError, Shelf
from djinn_plugins.executor.cuda.graph_eligibility import (
    MIN_SAVED,
    GraphStage,
    can_be_recorded,
    changes_metadata,
    digest_of_numbers,
    forms_of,
)
from djinn_plugins.executor.cuda.segment_runs import SegmentedRuns, SegmentPlayer
from djinn_plugins.executor.cuda.signatures import KnownSignature, Signatures
from djinn_plugins.executor.torch.executor import TorchProgram
from djinn_plugins.executor.torch.interpreter import interpret
from djinn_plugins.executor.torch.random import TorchRandomState

__all__ = ("RecordedProgram",)

PATIENCE_RUNS = 16
"""Number of runs without a usable recording after which a program is no longer recorded whole."""


class RecordedProgram(TorchProgram):
    """A program that is recorded for signatures that recur, and replayed afterwards.

    A program that cannot be recorded whole is cut into segments that can; see
    `djinn_plugins.executor.cuda.segment_runs`.
    """

    def __init__(
        self, program: Program, calls: Sequence[BoundCall], lock: threading.RLock, device: torch.device, shelf: Shelf,
        *, min_saved: int = MIN_SAVED, least_steps: int = MIN_SAVED, relieve: Callable[[], bool] = lambda: False,
        in_segments: bool = True,
    ) -> None:
        super().__init__(program, calls, lock, relieve)
        self._device = device
        self._shelf = shelf
        self._signatures = Signatures(program, calls, device, shelf)
        self._is_watched = can_be_recorded(program, min_saved=min_saved)
        self._changes_metadata = changes_metadata(program)
        self._least_steps = least_steps
        self._segmented: SegmentedRuns | None = None
        self._is_cut = in_segments and not self._changes_metadata
        self._idle_runs = 0

    @property
    def segments(self) -> list[SegmentPlayer]:
        """The segments of a program that is not recorded whole."""
        return [] if self._segmented is None else self._segmented.players

    def grow(self, join: Callable[[BoundCall], BoundCall]) -> None:
        """Let values grow, outside of recordings: a replay would not do what the host does for it."""
        super().grow(join)
        if self.growth.steps:
            self._is_watched = False

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once, or in part (`djinn_plugins.common.kinds.executor.SupportsStop`). A recording is played whole."""
        if not self._is_watched or not self._shelf.recorder.is_usable:
            if self._changes_metadata:
                self._shelf.metadata_changes += 1
            return super().run_until(stop, inputs, numbers, random, report)
        with self._lock, torch.inference_mode():
            terms = digest_of_numbers(numbers), self._shelf.recorder.settings()
            recording = self._signatures.found(terms, inputs)
            if recording is not None:
                self._idle_runs = 0
                with suppress(NotPlayedError):
                    return self._shelf.play(recording, inputs, self._relieve)
                return super().run_until(stop, inputs, numbers, random, report)
            self._idle_runs += 1
            if self._idle_runs > PATIENCE_RUNS:
                self._forget()
            forms = forms_of(inputs, self._device)
            if forms is None or not self._is_watched:
                return super().run_until(stop, inputs, numbers, random, report)
            return self._run_watched(self._signatures.look_up(terms, forms), inputs, numbers, random, report, stop)

    def run_without(
        self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        refused: Mapping[int, Exception], stop: Sequence[BaseException] = (),
    ) -> list[Any]:
        """Run once without some steps; see `djinn_plugins.common.kinds.executor.SupportsSkippedSteps`."""
        if refused and self._changes_metadata:
            self._shelf.metadata_changes += 1
        return super().run_without(inputs, numbers, random, report, refused, stop)

    def _run(
        self, inputs: list[Any], numbers: Sequence[Any], report: Report, refused: Mapping[int, Exception],
        stop: Sequence[BaseException],
    ) -> list[Any]:
        if refused or self._is_watched or not self._is_cut or not self._shelf.recorder.is_usable:
            return super()._run(inputs, numbers, report, refused, stop)
        if self._segmented is None:
            made = SegmentedRuns(self._program, self._calls, self._device, self._shelf, single=self.growth.steps,
                                 least_steps=self._least_steps, relieve=self._relieve)
            self._is_cut = made.is_worthwhile
            if not self._is_cut:
                return super()._run(inputs, numbers, report, refused, stop)
            self._segmented = made
        return self._segmented.run(inputs, numbers, report, stop)

    def _forget(self) -> None:
        self._is_watched = False
        self._signatures.forget()

    def _run_watched(
        self, known: KnownSignature, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        stop: Sequence[BaseException],
    ) -> list[Any]:
        candidate = known.candidate
        stage = candidate.observe(inputs)
        if stage is GraphStage.RECORD:
            with switched(self._switches):
                recording = self._signatures.record(known, inputs, numbers)
            if recording is not None:
                self._idle_runs = 0
                if recording.fits(inputs):
                    with suppress(NotPlayedError):
                        return self._shelf.play(recording, inputs, self._relieve)
        failed: list[int] = []

        def note(step: int, error: BaseException) -> Poisoned:
            failed.append(step)
            return report(step, error)

        state = random.get() if self._is_random else None
        if stage is GraphStage.REHEARSE:
            results = self._rehearse(known, inputs, numbers, random, note)
        else:
            results = super().run_until(stop, inputs, numbers, random, note)
        if failed:
            candidate.refuse()
        if state is not None and not torch.equal(state, random.get()):
            # Its numbers and shapes determine how much is drawn, so equal runs draw nothing, either.
            self._forget()
        return results

    def _rehearse(
        self, known: KnownSignature, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report
    ) -> list[Any]:
        if len(numbers) != self._numbers:
            raise ProtocolError(f"The program takes {self._numbers} numbers, the run brings {len(numbers)}.")
        lent = random.lent_to_device() if isinstance(random, TorchRandomState) and self._is_random else nullcontext()
        with lent, switched(self._switches):
            return self._signatures.rehearse(
                known, inputs, lambda calls: interpret(self._program, calls, inputs, numbers, report))
