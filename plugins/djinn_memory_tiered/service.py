"""A session whose values share a memory limit with those of other sessions."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from djinn_lib_service.capabilities import SupportsSpeculation
from djinn_lib_service.failures import is_out_of_memory
from djinn_lib_service.kinds.executor import CandidProgram, CompiledProgram, Effects
from djinn_lib_service.kinds.guard import SizingProgram
from djinn_lib_service.service import SessionService
from djinn_lib_service.tensor_bytes import bytes_of

from djinn.errors import DjinnError, OutOfMemoryError
from djinn.wire import messages
from djinn.wire.messages import (
    Batch,
    Command,
    Copy,
    Item,
    Parcel,
    Peer,
    Poisoned,
    Recall,
    Receive,
    Result,
    Run,
    Send,
    Upload,
)
from djinn_memory_tiered.manager import MemoryManager
from djinn_memory_tiered.roles import Role
from djinn_memory_tiered.storages import Place, Places, Recipe, State

STEADY_GROWTHS = 2
"""After growing this many times in a row, a storage counts as a KV cache, even if no attention is seen to read it."""


class BudgetedService(SessionService):
    """A session that shares a memory limit with others; see `djinn_lib_service.service.SessionService`.

    Values are restored before they are used, and there is room for results before they are computed.

    Args:
        keeper: Enforces the limit.
        arguments: As for `SessionService`.

    Attributes:
        places: The session's values and their storages.
        random: Its random generator.
        decoded_at: When one of its KV caches last grew.

    Concurrency:
        One batch at a time; threads of other sessions may evict its values while they hold the keeper's lock.
    """

    def __init__(self, keeper: MemoryManager, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._keeper = keeper
        self._values = self.places = Places(keeper.accounts, keeper.clock)
        self.random = self._random
        self.decoded_at = float("-inf")
        # Memory shared with another owner could not be given back, and could not be read safely while other sessions
        # run.
        self._put = self._adopt = self._put_in
        self._get = self._executor.get
        self._fail = self._fail_typed
        self._ahead_bytes = 0
        self._failed = 0
        self._can_repeat = True
        """Whether all steps of the last run succeeded."""
        self._took: dict[int, tuple[int, float]] = {}
        """By program: the memory that its last run needed in addition to its inputs, and how long it took."""
        with keeper.lock:
            keeper.join(self)

    def close(self) -> None:
        """Drop all values and programs of the session."""
        with self._keeper.lock:
            super().close()
            self._count_ahead()
            self._keeper.leave(self)

    def handle(
        self, batch: Batch, tensors: Sequence[torch.Tensor], stop: Sequence[DjinnError] = ()
    ) -> tuple[Result, list[torch.Tensor]]:
        """Execute a batch; see `SessionService.handle`."""
        answer = super().handle(batch, tensors, stop)
        with self._keeper.lock:
            self._keeper.breathe()
        return answer

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next request can be predicted with confidence, and there is room for it."""
        with self._keeper.lock:
            return self._keeper.fits_ahead(0) and super().can_look_ahead

    def look_ahead(self) -> bool:
        """Run one more program ahead; see `SessionService.look_ahead`."""
        with self._keeper.lock:
            try:
                return super().look_ahead()
            finally:
                self._count_ahead()

    def drop_ahead(self) -> int:
        """Drop results that the client has not requested, and return how many bytes they used."""
        size_bytes = self._ahead_bytes
        self._lookahead.drop()
        self._count_ahead()
        return size_bytes

    def _count_ahead(self) -> None:
        found: dict[int, int] = {}
        for value in self._lookahead.results:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and self.places.of(value) is None:
                storage = value.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        size_bytes = sum(found.values())
        self._keeper.accounts.ahead_bytes += size_bytes - self._ahead_bytes
        self._ahead_bytes = size_bytes

    def _fail_typed(self, error: BaseException, **where: Any) -> Poisoned:
        self._failed += 1
        if is_out_of_memory(error):
            keeper = self._keeper
            keeper.accounts.refused += 1
            error = OutOfMemoryError(
                f"{str(error).splitlines()[0]} The limit is {keeper.limit_bytes} bytes; the device holds "
                f"{keeper.accounts.described()}.", hint="Let go of tensors, or work in smaller pieces.")
        return self._failures.add(error, **where)

    def _carry_out(self, command: Command, uploads: Iterator[torch.Tensor]) -> None:
        if isinstance(command, (Send, Peer)):
            # Other sessions may run while this one waits.
            super()._carry_out(command, uploads)
            return
        with self._keeper.lock:
            if not isinstance(command, Receive):
                super()._carry_out(command, uploads)
                self._count_ahead()
                self._keeper.release()
                return
            self.drop_ahead()
        self._receive(command)

    def _accept(self, command: Receive, arrived: tuple[Parcel, Sequence[torch.Tensor]] | Poisoned) -> None:
        with self._keeper.lock:
            super()._accept(command, arrived)
            self._keeper.release()

    def _put_in(self, tensor: torch.Tensor) -> torch.Tensor:
        self._keeper.use(self, (), tensor.numel() * tensor.element_size())
        value: torch.Tensor = self._keeper.with_relief(lambda: self._executor.put(tensor))
        return value

    def _upload(self, command: Upload, tensor: torch.Tensor) -> None:
        self._forget_sources((command.handle,))
        super()._upload(command, tensor)
        self._is_uploaded(command.handle)

    def _recall(self, command: Recall) -> None:
        self._forget_sources((command.handle,))
        super()._recall(command)
        self._is_uploaded(command.handle)

    def _is_uploaded(self, handle: int) -> None:
        place = self.places.at(handle)
        if place is None:
            return
        self.places.grant(place, Role.WEIGHT)
        kept = None if self._contents is None else self._contents.kept(handle)
        if kept is not None and kept.numel() * kept.element_size() == place.size_bytes:
            place.host = bytes_of(kept)

    def _free(self, handles: Sequence[int]) -> None:
        self._forget_sources(handles)
        super()._free(handles)

    def _forget_sources(self, handles: Sequence[int]) -> None:
        """Record that the uploads behind these values will no longer be kept."""
        if self._contents is not None:
            for handle in handles:
                place = self.places.at(handle)
                if place is not None and place.host is not None and self._contents.kept(handle) is not None:
                    self._keeper.moved_to_host(place)

    def _places_of(self, handles: Iterable[int]) -> list[Place]:
        return [place for handle in handles if (place := self.places.at(handle)) is not None]

    def _copy(self, command: Copy) -> None:
        sources = self._places_of(source for source, _, _ in command.handles)
        copied = {place for source, _, base in command.handles
                  if not base and (place := self.places.at(source)) is not None}
        bases = self._places_of(base for _, _, base in command.handles if base)
        try:
            self._keeper.use(self, (*sources, *bases), sum(place.size_bytes for place in copied))
        except OutOfMemoryError as error:
            poison, targets = self._fail(error), [target for _, target, _ in command.handles]
            if self._admits(targets):
                for target in targets:
                    self._values.put(target, poison)
            return
        super()._copy(command)

    def _fetch(self, handle: int, data: list[torch.Tensor]) -> Item:
        with self._keeper.lock:
            place = self.places.at(handle)
            if place is not None:
                missing = self._attempt(lambda: self._keeper.use(self, (place,), 0))
                if isinstance(missing, Poisoned):
                    return missing
            item = super()._fetch(handle, data)
            self._keeper.release()
            return item

    def _packed(self, command: Send, session: str) -> tuple[Parcel, Sequence[torch.Tensor]] | Poisoned:
        with self._keeper.lock:
            self._keeper.use(self, self._places_of((command.handle, *command.family)), 0)
            packed = super()._packed(command, session)
            self._keeper.release()
            return packed

    def _outputs_of(self, run: Run) -> list[Any]:
        keeper, known = self._keeper, self._programs.get(run.program)
        self._count_ahead()
        if known is None or known.program is None or len(run.inputs) != known.definition.body.inputs:
            return super()._outputs_of(run)
        numbers = messages.from_wire(run.numbers)
        inputs = [self._values.get(handle) for handle in run.inputs]
        wanted_bytes = self._wanted_bytes(run, inputs, numbers)
        effects = _effects_of(known.program, numbers, len(inputs))
        written = {place for index in effects.written if (place := self.places.at(run.inputs[index])) is not None}
        keeper.use(self, self._places_of(run.inputs), wanted_bytes, written=written)
        begin_s, failed = time.perf_counter(), self._failed
        try:
            outputs = super()._outputs_of(run)
        finally:
            keeper.release()
            if effects.changes_storages:
                self.places.recount()
        self._took[run.program] = wanted_bytes, time.perf_counter() - begin_s
        self._can_repeat = self._failed == failed
        return outputs

    def _wanted_bytes(self, run: Run, inputs: Sequence[Any], numbers: Sequence[Any]) -> int:
        """Return how much memory a run needs in addition to its inputs, as far as it can be known."""
        checked = self._programs[run.program].checked
        if not isinstance(checked, SizingProgram):
            return self._took.get(run.program, (0, 0.0))[0]
        checked.refused(inputs, numbers)
        wanted_bytes = checked.taken_bytes
        if self._keeper.accounts.held_bytes + wanted_bytes > self._keeper.limit_bytes:
            # For a loop, the known value is an upper bound; measuring may give less.
            wanted_bytes = checked.measure(inputs, numbers)
        return wanted_bytes

    def _run_ahead(self, run: Run, inputs: list[Any]) -> list[Any] | None:
        places = [self.places.of(value) for value in inputs]
        if any(place is not None and place.state is not State.HERE for place in places) or not self._keeper.fits_ahead(
            self._took.get(run.program, (0, 0.0))[0]
        ):
            return None
        self._keeper.use(self, [place for place in places if place is not None], 0)
        try:
            return super()._run_ahead(run, inputs)
        finally:
            self._keeper.release()

    def _take_in(self, run: Run, outputs: Sequence[Any]) -> None:
        self._count_ahead()
        places = self.places
        inputs = [self._values.get(handle) for handle in run.inputs]
        read = [places.at(handle) for handle in run.inputs]
        fresh = [index for index, value in enumerate(outputs)
                 if isinstance(value, torch.Tensor) and places.of(value) is None]
        super()._take_in(run, outputs)
        known = self._programs.get(run.program)
        if known is None or known.program is None:
            return
        numbers = messages.from_wire(run.numbers)
        made = {index: place for index in fresh if (place := places.of(outputs[index])) is not None}
        if self._can_repeat:
            self._learn_recipe(run, known.program, numbers, inputs, read, made)
        self._can_repeat = True
        self._learn_caches(known.program, read, [places.of(value) for value in outputs])
        self._bound(run, {place for place in read if place is not None}, made)

    def _bound(self, run: Run, read: set[Place], made: dict[int, Place]) -> None:
        """Check that the results of a run fit, because their size was not known before."""
        wanted_bytes, duration_s = self._took.get(run.program, (0, 0.0))
        size_bytes = sum(place.size_bytes for place in set(made.values()))
        self._took[run.program] = max(wanted_bytes, size_bytes), duration_s
        try:
            if size_bytes + sum(place.size_bytes for place in read) > self._keeper.limit_bytes:
                raise self._keeper.no_room(size_bytes)
            self._keeper.fit()
        except OutOfMemoryError as error:
            poison = self._fail(error, run=run.program)
            for index in made:
                if index < len(run.outputs):
                    self._values.put(run.outputs[index], poison)

    def _learn_recipe(
        self, run: Run, program: CompiledProgram, numbers: Sequence[Any], inputs: Sequence[Any],
        read: Sequence[Place | None], made: dict[int, Place],
    ) -> None:
        """Remember how storages were computed, if the computation can be repeated."""
        now = self._keeper.clock()
        for place in read:
            if place is not None:
                place.used_at = now
        if not made or not isinstance(program, SupportsSpeculation) or not program.is_pure(numbers):
            return
        for place in made.values():
            self.places.grant(place, Role.ACTIVATION)
        if not isinstance(program, CandidProgram) or not program.effects.repeats or any(
            isinstance(value, Poisoned) or (isinstance(value, torch.Tensor) and place is None)
            for value, place in zip(inputs, read, strict=True)
        ):
            return
        wanted_bytes, duration_s = self._took.get(run.program, (0, 0.0))
        recipe = Recipe(
            program, numbers, [weakref.ref(value) if isinstance(value, torch.Tensor) else value for value in inputs],
            [(place, place.writes) for place in dict.fromkeys(read) if place is not None], wanted_bytes, duration_s)
        for index, place in made.items():
            # Several results may lie in one storage; any of them is enough to restore all of it.
            if place.recipe is not recipe:
                recipe.made[index] = place
                place.recipe = recipe

    def _learn_caches(
        self, program: CompiledProgram, read: Sequence[Place | None], results: Sequence[Place | None]
    ) -> None:
        """Recognize KV caches by how storages grow and by which operations read them."""
        if not isinstance(program, CandidProgram):
            return
        effects = program.effects
        for index, source in effects.grown.items():
            before, place = read[source], results[index] if index < len(results) else None
            if before is None or place is None or place is before or place.size_bytes <= before.size_bytes:
                continue
            place.growths = before.growths + 1
            is_read = index in effects.attended or before.role is Role.KV_CACHE
            if is_read or place.growths >= STEADY_GROWTHS:
                self._is_cache(place)
        for index in effects.patched:
            before = read[index]
            if before is not None and -1 - index in effects.attended:
                self._is_cache(before)

    def _is_cache(self, place: Place) -> None:
        self.places.grant(place, Role.KV_CACHE)
        self.decoded_at = self._keeper.clock()


def _effects_of(program: CompiledProgram, numbers: Sequence[Any], inputs: int) -> Effects:
    """Return the effects that a run may have on its inputs."""
    is_pure = isinstance(program, SupportsSpeculation) and program.is_pure(numbers)
    if is_pure:
        return Effects()
    if isinstance(program, CandidProgram):
        return program.effects
    return Effects(written=frozenset(range(inputs)), changes_storages=True)



