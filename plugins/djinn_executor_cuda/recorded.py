"""Programs that are recorded when they repeat."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import attrs
import torch
from djinn_lib_service.kinds.executor import RandomState, Report
from djinn_lib_torch.calls import BoundCall
from djinn_lib_torch.codegen import Compiled
from djinn_lib_torch.executor import TorchProgram
from djinn_lib_torch.interpreter import interpret
from djinn_lib_torch.random import TorchRandomState

from djinn.errors import ProtocolError
from djinn.ir.program import Program
from djinn.wire.messages import Poisoned
from djinn_executor_cuda.cuda_graphs import CapturedGraph, NotRecordedError, Shelf, places_of, record
from djinn_executor_cuda.graph_eligibility import (
    MIN_SAVED,
    CaptureCandidate,
    Form,
    GraphStage,
    can_be_recorded,
    changes_metadata,
    digest_of_numbers,
    forms_of,
    storage_of,
    watched,
)

__all__ = ("RecordedProgram",)

MAX_SIGNATURES = 8
"""Maximum number of signatures of one program that are watched; the least recently seen is dropped first."""
PATIENCE_RUNS = 64
"""Number of runs without a usable recording after which a program is no longer watched."""
_Terms: TypeAlias = tuple[bytes, tuple[Any, ...]]
"""Conditions besides the inputs that must be equal: numbers, and the recorder's settings."""
_log = logging.getLogger("djinn.executor")


@attrs.define(eq=False)
class _Known:
    """The state of one signature: the history of its runs, and its recording."""

    candidate: CaptureCandidate = attrs.field(factory=CaptureCandidate)
    written: frozenset[int] = frozenset()
    places: list[Any] = attrs.field(factory=list)
    recording: CapturedGraph | None = None


class RecordedProgram(TorchProgram):
    """A program that is recorded for signatures that recur, and replayed afterwards.

    A program that cannot be recorded, or draws random numbers, runs like any other program.
    """

    def __init__(
        self, program: Program, calls: Sequence[BoundCall], lock: threading.RLock, device: torch.device, shelf: Shelf,
        *, min_saved: int = MIN_SAVED, relieve: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(program, calls, lock, relieve)
        self._device = device
        self._shelf = shelf
        self._known: OrderedDict[tuple[_Terms, tuple[Form, ...]], _Known] = OrderedDict()
        self._latest: tuple[_Terms, int, CapturedGraph] | None = None
        """The last recording played, with the number of metadata changes at that time."""
        self._is_watched = can_be_recorded(program, min_saved=min_saved)
        self._changes_metadata = changes_metadata(program)
        self._idle_runs = 0

    def grow(self, join: Callable[[BoundCall], BoundCall]) -> None:
        """Let values grow only in a program that is never recorded: a replay would not do what the host does for it."""
        if not self._is_watched:
            super().grow(join)

    def run_until(
        self, stop: Sequence[BaseException], inputs: list[Any], numbers: Sequence[Any], random: RandomState,
        report: Report,
    ) -> list[Any]:
        """Run once, or in part (`djinn_lib_service.kinds.executor.SupportsStop`). A recording is played whole."""
        if not self._is_watched or not self._shelf.recorder.is_usable:
            if self._changes_metadata:
                self._shelf.metadata_changes += 1
            return super().run_until(stop, inputs, numbers, random, report)
        with self._lock, torch.inference_mode():
            terms = digest_of_numbers(numbers), self._shelf.recorder.settings()
            recording = self._found(terms, inputs)
            if recording is not None:
                self._idle_runs = 0
                return self._shelf.play(recording, inputs)
            self._idle_runs += 1
            if self._idle_runs > PATIENCE_RUNS:
                self._forget()
            forms = forms_of(inputs, self._device)
            if forms is None or not self._is_watched:
                return super().run_until(stop, inputs, numbers, random, report)
            return self._run_watched(self._look_up(terms, forms), inputs, numbers, random, report, stop)

    def run_without(
        self, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        refused: Mapping[int, Exception], stop: Sequence[BaseException] = (),
    ) -> list[Any]:
        """Run once without some steps; see `djinn_lib_service.kinds.executor.SupportsSkippedSteps`."""
        if refused and self._changes_metadata:
            self._shelf.metadata_changes += 1
        return super().run_without(inputs, numbers, random, report, refused, stop)

    def _found(self, terms: _Terms, inputs: Sequence[Any]) -> CapturedGraph | None:
        """Find a recording that fits; compares all forms only if it is not the last one."""
        changes = self._shelf.metadata_changes
        if self._latest is not None:
            of, at, recording = self._latest
            if of == terms and at == changes and not recording.is_closed and (
                recording.fits_unchanged(inputs, self._device)
            ):
                return recording
        self._latest = None
        if not any(known.recording is not None for known in self._known.values()):
            return None
        forms = forms_of(inputs, self._device)
        known = None if forms is None else self._known.get((terms, forms))
        if known is None or known.recording is None:
            return None
        if known.recording.is_closed or not known.recording.fits(inputs):
            known.candidate.outgrown(inputs, known.recording.plays)
            known.recording = None
            return None
        self._latest = terms, changes, known.recording
        return known.recording

    def _look_up(self, terms: _Terms, forms: tuple[Form, ...]) -> _Known:
        known = self._known.get((terms, forms))
        if known is None:
            known = self._known[terms, forms] = _Known()
            if len(self._known) > MAX_SIGNATURES:
                self._known.popitem(last=False)
        self._known.move_to_end((terms, forms))
        return known

    def _forget(self) -> None:
        self._is_watched = False
        self._latest = None
        self._known.clear()

    def _run_watched(
        self, known: _Known, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report,
        stop: Sequence[BaseException],
    ) -> list[Any]:
        candidate = known.candidate
        stage = candidate.observe(inputs)
        if stage is GraphStage.RECORD:
            recording = self._recorded(known, inputs, numbers)
            if recording is not None and recording.fits(inputs):
                return self._shelf.play(recording, inputs)
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
        self, known: _Known, inputs: list[Any], numbers: Sequence[Any], random: RandomState, report: Report
    ) -> list[Any]:
        """Run, and determine which inputs the program writes and which inputs its results are views of."""
        if len(numbers) != self._numbers:
            raise ProtocolError(f"The program takes {self._numbers} numbers, the run brings {len(numbers)}.")
        written: set[int] = set()
        calls = watched(self._program, self._calls, written)
        storages = [storage_of(value) for value in inputs]
        with random.lent_to_device() if isinstance(random, TorchRandomState) and self._is_random else nullcontext():
            results = self._shelf.recorder.rehearse(
                lambda: interpret(self._program, calls, inputs, numbers, report))
        if any(result is value for result in results for value in inputs):
            # A later in-place change of the metadata of one would change the other, too.
            known.candidate.refuse()
        shown = {storage_of(value) for value in results if isinstance(value, torch.Tensor)}
        known.written = frozenset(written.intersection(storages))
        known.places = places_of(results)
        known.candidate.rehearsed(index for index, storage in enumerate(storages)
                                  if storage in written or storage in shown)
        return results

    def _recorded(self, known: _Known, inputs: list[Any], numbers: Sequence[Any]) -> CapturedGraph | None:
        """Record the program, if that is possible, without running it."""
        if self._compiled is None:
            self._compiled = Compiled(self._program, self._calls, self._relieve)
        try:
            made = record(self._shelf.recorder, self._compiled.function, inputs, numbers, known.candidate.changed,
                          known.written, known.places)
        except NotRecordedError as error:
            known.candidate.refuse()
            self._shelf.failed()
            _log.debug("a program of %d steps is not recorded: %s", len(self._program.steps), error)
            return None
        known.recording = made
        self._shelf.add(made)
        self._idle_runs = 0
        _log.debug("a program of %d steps is recorded; %s", len(self._program.steps), self._shelf.stats())
        return made
