"""Recordings of programs: the same work in one launch.

A recording reads and writes the memory that it was made with. So an input is either the same tensor in every run, which
is used in place, or its values are copied into memory of the recording before each run. Results are copied out after
each run, so that the next one does not overwrite them.

All recordings of an executor may share one pool of memory: a recording may use, for intermediate values, the memory of
the results of any recording that was made later. So results stay valid only until an older recording is played.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeAlias

import attrs
import torch

from djinn.wire.tensors import is_dense
from djinn_plugins.common.failures import is_out_of_memory, with_relief
from djinn_plugins.common.memory.tensor_bytes import address_of, storage_address_of
from djinn_plugins.executor.cuda.graph_eligibility import Form, alignment_of, form_of, storage_of

__all__ = ("MAX_RECORDINGS", "CaptureAttempt", "CapturedGraph", "GraphRecorder", "NotPlayedError", "NotRecordedError",
           "Shelf", "moved_out", "places_of", "record")

MAX_RECORDINGS = 256
"""Maximum recordings of one executor, for all programs and sessions; the least recently played is dropped first."""


class NotRecordedError(Exception):
    """A program cannot be recorded. This has no effect, and the program runs as before."""


class NotPlayedError(Exception):
    """The device has no memory to play a recording. This has no effect, and the program can run as before."""


class CaptureAttempt(Protocol):
    """A recording made by a device.

    Attributes:
        results: The tensors that hold the results after each play.
        size_bytes: Its own memory.
    """

    results: list[Any]
    size_bytes: int

    def play(self) -> None:
        """Execute it, in order with the device's other work."""

    def close(self) -> None:
        """Release its memory; it is not played any more."""


class GraphRecorder(Protocol):
    """Records a device's work.

    Attributes:
        is_usable: Whether recording works; once it does not, it never does again.
        limit_bytes: Memory for all recordings together.
    """

    is_usable: bool
    limit_bytes: int

    def settings(self) -> tuple[Any, ...]:
        """Return the settings that kernels depend on besides their arguments."""

    def rehearse(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Run in the same way as for a recording, so that one-time initializations happen before it."""

    def record(self, run: Callable[[], list[Any]]) -> CaptureAttempt:
        """Record without executing: no existing tensor changes.

        Raises:
            NotRecordedError: Recording is not possible; the device is unchanged.
        """


@attrs.frozen
class _Place:
    """The layout of a result in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this layout in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@attrs.frozen
class _OfInput:
    """A result that is a view of an input."""

    index: int
    place: _Place


@attrs.frozen
class _OfStorage:
    """A result in a storage of the recording, by the position of the storage."""

    position: int
    place: _Place


_Outlet: TypeAlias = _OfInput | _OfStorage | None


@attrs.frozen
class _Bound:
    """An input that is used in place. A recording does not keep it alive."""

    seen: weakref.ref[torch.Tensor]
    address: int
    """Of its storage."""
    offset: int


class CapturedGraph:
    """A program, recorded for inputs of certain forms, and for certain numbers.

    Args:
        take: The device's recording.
        bound: Inputs that are used in place.
        copied: Memory for the values of the other inputs.
        written: Storages of inputs that the program writes.
        outlets: How to make each result.
        sources: Storages of the recording that hold the results, as ``u8[N]``.
    """

    def __init__(
        self, take: CaptureAttempt, bound: dict[int, _Bound], copied: dict[int, torch.Tensor], written: frozenset[int],
        outlets: Sequence[_Outlet], sources: Sequence[torch.Tensor],
    ) -> None:
        self.size_bytes = take.size_bytes + sum(buffer.untyped_storage().nbytes() for buffer in copied.values())
        self.plays = 0
        self._take: CaptureAttempt | None = take
        self._bound = list(bound.items())
        self._copied = list(copied.items())
        self._copied_forms: list[tuple[int, Form | None]] = [(index, form_of(buffer, buffer.device))
                                                            for index, buffer in copied.items()]
        self._written = written
        self._outlets = list(outlets)
        self._sources = list(sources)
        seen: dict[int, int] = {}
        self._firsts = [seen.setdefault(id(result), position) for position, result in enumerate(take.results)]
        """By result: the first one that is the same tensor, as that of `lift_fresh` is. It changes its size with it."""

    @property
    def is_closed(self) -> bool:
        """Whether it was evicted."""
        return self._take is None

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether playing it with these inputs, of the same forms, is equivalent to the program."""
        for index, bound in self._bound:
            value = inputs[index]
            if bound.seen() is not value or storage_address_of(value) != bound.address or (
                value.storage_offset() != bound.offset
            ):
                return False
        # A copied input would not see a write to its original.
        return not self._written or all(storage_of(inputs[index]) not in self._written for index, _ in self._copied)

    def fits_unchanged(self, inputs: Sequence[Any], device: torch.device) -> bool:
        """Whether it fits, if no tensor has changed its form since it last did: then only copied inputs are checked."""
        if len(inputs) != len(self._bound) + len(self._copied):
            return False
        return all(form_of(inputs[index], device) == form for index, form in self._copied_forms) and self.fits(inputs)

    def play(self, inputs: Sequence[torch.Tensor], relieve: Callable[[], bool]) -> list[Any]:
        """Run the program on inputs that it fits.

        Raises:
            NotPlayedError: The device has no memory for it.
        """
        self._launch(inputs)
        storages = [with_relief(source.clone, relieve).untyped_storage() for source in self._sources]
        return self._same([self._result(outlet, inputs, storages) for outlet in self._outlets])

    def play_in_place(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Run the program on inputs that it fits, and leave the results in the recording's memory.

        These results are the same tensors each time.
        """
        results = self._launch(inputs)
        return self._same([self._result(outlet, inputs, ()) if isinstance(outlet, _OfInput) else result
                           for outlet, result in zip(self._outlets, results, strict=True)])

    def _same(self, results: Sequence[Any]) -> list[Any]:
        return [results[first] for first in self._firsts]

    @property
    def storages(self) -> list[int]:
        """The storages of the recording that hold results."""
        return [storage_of(source) for source in self._sources]

    @property
    def fixed(self) -> list[int]:
        """The results that are the same tensors each time, if they are left in place; by ``id``."""
        results = [] if self._take is None else self._take.results
        return [id(result) for outlet, result in zip(self._outlets, results, strict=False)
                if isinstance(outlet, _OfStorage)]

    def _launch(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        if self._take is None:
            raise RuntimeError("the recording is closed")
        self.plays += 1
        try:
            if self._copied:
                torch._foreach_copy_(
                    [buffer for _, buffer in self._copied], [inputs[index] for index, _ in self._copied])
            self._take.play()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise NotPlayedError from error
            raise
        return self._take.results

    def close(self) -> None:
        """Release its memory."""
        take, self._take = self._take, None
        self._copied, self._sources = [], []
        if take is not None:
            take.close()

    @staticmethod
    def _result(outlet: _Outlet, inputs: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> Any:
        if outlet is None:
            return None
        place = outlet.place
        if isinstance(outlet, _OfInput):
            return inputs[outlet.index].as_strided(place.size, place.stride, place.offset)
        return place.within(storages[outlet.position])


def moved_out(values: Sequence[Any], storages: AbstractSet[int], relieve: Callable[[], bool]) -> list[Any]:
    """Copy those values that lie in some storages; values that share a storage share the copy."""
    copies: dict[int, torch.UntypedStorage] = {}
    moved = {id(value): value for value in values}
    for value in values:
        if not isinstance(value, torch.Tensor) or (name := storage_of(value)) not in storages:
            continue
        if name not in copies:
            copies[name] = with_relief(_bytes_of_storage(value).clone, relieve).untyped_storage()
        made = _Place.of(value).within(copies[name])
        made = made.conj() if value.is_conj() else made
        moved[id(value)] = torch._neg_view(made) if value.is_neg() else made
    return [moved[id(value)] for value in values]


def record(
    recorder: GraphRecorder, function: Callable[[list[Any], Sequence[Any]], list[Any]], inputs: Sequence[torch.Tensor],
    numbers: Sequence[Any], changed: set[int], written: frozenset[int], wanted: Sequence[Any],
) -> CapturedGraph:
    """Record a program for inputs like these.

    Args:
        recorder: The recorder of the inputs' device.
        function: The program.
        inputs: Ordinary tensors.
        numbers: Its numbers, which become part of the recording.
        changed: Inputs that are other tensors in other runs.
        written: Storages of inputs that it writes.
        wanted: Layouts of its results, as `places_of` returns them for a run.

    Raises:
        NotRecordedError: Recording is not possible.
    """
    bound = {index: _Bound(weakref.ref(value), storage_address_of(value), int(value.storage_offset()))
             for index, value in enumerate(inputs) if index not in changed}
    copied = {index: _buffer_like(inputs[index]) for index in sorted(changed)}
    fed = [copied.get(index, value) for index, value in enumerate(inputs)]
    take = recorder.record(lambda: function(fed, numbers))
    try:
        if places_of(take.results) != wanted:
            raise NotRecordedError("the results have another form than in a run")
        outlets, sources = _outlets(take.results, inputs, bound, copied)
        made = CapturedGraph(take, bound, copied, written, outlets, sources)
        if made.size_bytes > recorder.limit_bytes:
            raise NotRecordedError(f"it needs {made.size_bytes} bytes, and {recorder.limit_bytes} are the limit")
    except NotRecordedError:
        take.close()
        raise
    return made


def places_of(results: Sequence[Any]) -> list[Any]:
    """Return the devices and layouts of results."""
    return [(value.device, _Place.of(value)) if isinstance(value, torch.Tensor) else value for value in results]


def _buffer_like(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a dense tensor to memory with the same alignment, which is part of the signature."""
    if not is_dense(tuple(tensor.size()), tensor.stride()):
        raise NotRecordedError("an input that changes is not dense")
    lead = address_of(tensor) % alignment_of(tensor.device) // tensor.element_size()
    memory = torch.empty(lead + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.size(), tensor.stride(), lead).copy_(tensor)


def _outlets(
    results: Sequence[Any], inputs: Sequence[torch.Tensor], bound: dict[int, _Bound], copied: dict[int, torch.Tensor]
) -> tuple[list[_Outlet], list[torch.Tensor]]:
    given = {storage_of(inputs[index]): index for index in bound}
    buffers = {storage_of(buffer) for buffer in copied.values()}
    outlets: list[_Outlet] = []
    sources: dict[int, torch.Tensor] = {}
    positions: dict[int, int] = {}
    for result in results:
        if result is None:
            outlets.append(None)
            continue
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or result.is_conj() or (
            result.is_neg() or result.dtype == torch.complex32
        ):
            raise NotRecordedError(f"a result is {type(result).__name__} of no ordinary kind")
        name = storage_of(result)
        if name in buffers:
            raise NotRecordedError("a result is a view of an input that changes")
        if name in given:
            if result.dtype != inputs[given[name]].dtype:
                raise NotRecordedError("a result shows an input's memory as another dtype")
            outlets.append(_OfInput(given[name], _Place.of(result)))
            continue
        if name not in positions:
            positions[name] = len(sources)
            sources[name] = _bytes_of_storage(result)
        outlets.append(_OfStorage(positions[name], _Place.of(result)))
    return outlets, list(sources.values())


def _bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Shelf:
    """The recordings of one executor, limited in number and bytes.

    Programs own their recordings; a recording leaves the shelf when its program is freed.

    Attributes:
        metadata_changes: Number of runs that may have changed sizes or strides of values in place.

    Concurrency:
        Any thread.
    """

    def __init__(self, recorder: GraphRecorder, *, limit: int = MAX_RECORDINGS) -> None:
        self.recorder = recorder
        self.metadata_changes = 0
        self._limit = limit
        self._lock = threading.RLock()
        self._recordings: OrderedDict[weakref.ref[CapturedGraph], int] = OrderedDict()
        self._plays = 0
        self._made = 0
        self._failed = 0

    @property
    def size_bytes(self) -> int:
        """Memory of all recordings."""
        with self._lock:
            return sum(self._recordings.values())

    def stats(self) -> dict[str, int]:
        """Return the numbers of recordings that were made, played and given up."""
        with self._lock:
            return {"recordings": len(self._recordings), "recording_bytes": self.size_bytes, "recorded": self._made,
                    "not_recorded": self._failed, "played": self._plays}

    def add(self, recording: CapturedGraph) -> None:
        """Add a recording, evicting others if needed."""
        with self._lock:
            self._made += 1
            while self._recordings and (
                len(self._recordings) >= self._limit
                or self.size_bytes + recording.size_bytes > self.recorder.limit_bytes
            ):
                oldest = self._recordings.popitem(last=False)[0]()
                if oldest is not None:
                    oldest.close()
            self._recordings[weakref.ref(recording, self._forget)] = recording.size_bytes

    def failed(self) -> None:
        """Count a program that could not be recorded."""
        self._failed += 1

    def play(
        self, recording: CapturedGraph, inputs: Sequence[torch.Tensor], relieve: Callable[[], bool] | None
    ) -> list[Any]:
        """Play a recording that fits.

        Args:
            recording: The recording.
            inputs: Its inputs.
            relieve: Frees memory, if there is none for copies of the results; ``None``: leave them where they are,
                because they are not needed for long.

        Raises:
            NotPlayedError: The device has no memory for it. All recordings are closed, which frees some.
        """
        with self._lock:
            self._plays += 1
            name = weakref.ref(recording)
            if name in self._recordings:
                self._recordings.move_to_end(name)
        try:
            return recording.play_in_place(inputs) if relieve is None else recording.play(inputs, relieve)
        except NotPlayedError:
            self.close()
            raise

    def close(self) -> bool:
        """Close all recordings, and return whether there were any."""
        with self._lock:
            had_some = bool(self._recordings)
            while self._recordings:
                recording = self._recordings.popitem()[0]()
                if recording is not None:
                    recording.close()
            return had_some

    def _forget(self, reference: weakref.ref[CapturedGraph]) -> None:
        with self._lock:
            self._recordings.pop(reference, None)
