"""The recordings of one program, or of one segment: one for each form of its inputs and each list of numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from djinn.ir.program import Program
from djinn_plugins.common.calls.binding import BoundCall
from djinn_plugins.common.memory.recently_used import RecentlyUsed
from djinn_plugins.executor.cuda.cuda_graphs import CapturedGraph, NotRecordedError, Shelf, places_of, record
from djinn_plugins.executor.cuda.graph_eligibility import CaptureCandidate, Form, forms_of, storage_of, watched
from djinn_plugins.executor.torch.codegen import straight_line

__all__ = ("KnownSignature", "Signatures", "Terms")

MAX_SIGNATURES = 8
"""Maximum number of signatures of one program that are watched; the least recently seen is dropped first."""
Terms: TypeAlias = tuple[bytes, tuple[Any, ...]]
"""Conditions besides the inputs that must be equal: numbers, and the recorder's settings."""
_log = logging.getLogger("djinn.executor")


@attrs.define(eq=False)
class KnownSignature:
    """The state of one signature: the history of its runs, and its recording."""

    candidate: CaptureCandidate = attrs.field(factory=CaptureCandidate)
    written: frozenset[int] = frozenset()
    places: list[Any] = attrs.field(factory=list)
    recording: CapturedGraph | None = None


class Signatures:
    """The signatures of one program.

    Args:
        program: The program.
        calls: Its bound templates.
        device: The device on which it runs.
        shelf: The recordings of all programs.
    """

    def __init__(self, program: Program, calls: Sequence[BoundCall], device: torch.device, shelf: Shelf) -> None:
        self._program = program
        self._calls = calls
        self._device = device
        self._shelf = shelf
        self._known = RecentlyUsed[tuple[Terms, tuple[Form, ...]], KnownSignature](MAX_SIGNATURES)
        self._latest: tuple[Terms, int, CapturedGraph] | None = None
        """The last recording played, with the number of metadata changes at that time."""

    def found(self, terms: Terms, inputs: Sequence[Any]) -> CapturedGraph | None:
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

    def look_up(self, terms: Terms, forms: tuple[Form, ...]) -> KnownSignature:
        """Return the state of a signature."""
        return self._known.use((terms, forms), KnownSignature)

    def forget(self) -> None:
        """Drop all."""
        self._latest = None
        self._known.clear()

    def close(self) -> None:
        """Close all recordings; they are made again when they are needed."""
        self._latest = None
        for known in self._known.values():
            if known.recording is not None:
                known.recording.close()
                known.recording = None

    def rehearse(
        self, known: KnownSignature, inputs: Sequence[Any], run: Callable[[Sequence[BoundCall]], list[Any]]
    ) -> list[Any]:
        """Run, and determine which inputs the program writes and which inputs its results are views of.

        Args:
            known: The signature.
            inputs: The inputs of the run.
            run: Runs the program with these calls in place of its own.
        """
        written: set[int] = set()
        calls = watched(self._program, self._calls, written)
        storages = [storage_of(value) for value in inputs]
        results = self._shelf.recorder.rehearse(lambda: run(calls))
        if any(result is value for result in results for value in inputs):
            # A later in-place change of the metadata of one would change the other, too.
            known.candidate.refuse()
        shown = {storage_of(value) for value in results if isinstance(value, torch.Tensor)}
        known.written = frozenset(written.intersection(storages))
        known.places = places_of(results)
        known.candidate.rehearsed(index for index, storage in enumerate(storages)
                                  if storage in written or storage in shown)
        return results

    def record(self, known: KnownSignature, inputs: list[Any], numbers: Sequence[Any]) -> CapturedGraph | None:
        """Record the program, if that is possible, without running it."""
        try:
            made = record(self._shelf.recorder, straight_line(self._program, self._calls), inputs, numbers,
                          known.candidate.changed, known.written, known.places)
        except NotRecordedError as error:
            known.candidate.refuse()
            self._shelf.failed()
            _log.debug("a program of %d steps is not recorded: %s", len(self._program.steps), error)
            return None
        known.recording = made
        self._shelf.add(made)
        _log.debug("a program of %d steps is recorded; %s", len(self._program.steps), self._shelf.stats())
        return made
