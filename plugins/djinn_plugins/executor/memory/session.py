"""The memory of one session, whose values share a memory limit with those of other sessions."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from djinn.errors import OutOfMemoryError
from djinn.wire import messages
from djinn.wire.messages import Poisoned, Run
from djinn_plugins.common.failures import is_out_of_memory
from djinn_plugins.common.kinds.executor import (
    CompiledProgram,
    Effects,
    RandomState,
    SupportsEffectReport,
    SupportsSpeculation,
)
from djinn_plugins.common.kinds.guard import SupportsSizing
from djinn_plugins.common.kinds.memory import Execute, KeptUploads, Put, RunsAhead, SessionMemory
from djinn_plugins.common.memory.tensor_bytes import bytes_of
from djinn_plugins.executor.memory.device_memory import DeviceMemory
from djinn_plugins.executor.memory.roles import Role
from djinn_plugins.executor.memory.storages import ManagedStorage, Places, Recipe, State
from djinn_plugins.executor.pauses import paused_ns
from djinn_plugins.executor.program_table import DefinedProgram

__all__ = ("TieredMemory",)

MAX_COSTS = 4096
"""Programs, the last ones that ran, whose costs are known."""
STEADY_GROWTHS = 2
"""After growing this many times in a row, a storage counts as a KV cache, even if no attention is seen to read it."""


@attrs.frozen
class _Cost:
    """What a run of a program has cost.

    Attributes:
        wanted_bytes: The memory that it needed in addition to its inputs.
        duration_s: How long it took.
    """

    wanted_bytes: int = 0
    duration_s: float = 0.0


class TieredMemory(SessionMemory):
    """The memory of a session that shares a memory limit with others.

    Values are restored before they are used, and there is room for results before they are computed.

    Args:
        device: The memory that it shares with other sessions.
        random: The session's random numbers.
        ahead: Results of runs that the client has not requested yet.
        uploads: The session's kept uploads.

    Attributes:
        places: The session's values and their storages.
        random: Its random numbers.
        decoded_at: When one of its KV caches last grew.

    Concurrency:
        As for `SessionMemory`; threads of other sessions may evict its values while they hold the lock.
    """

    # Memory shared with another owner could not be given back, and could not be read safely while other sessions run.
    can_share = False

    def __init__(self, device: DeviceMemory, random: RandomState, ahead: RunsAhead,
                 uploads: KeptUploads | None) -> None:
        super().__init__()
        self._device = device
        self.lock = device.lock
        self.values = self.places = Places(device.accounts, device.clock)
        self.random = random
        self.decoded_at = float("-inf")
        self._ahead = ahead
        self._ahead_bytes = 0
        self._uploads = uploads
        self._stated: dict[int, Role] = {}
        """Roles of storages that the program which runs has made."""
        self._costs: dict[int, _Cost] = {}
        """By program: what its last run has cost."""

    def close(self) -> None:
        """Leave the memory that sessions share; see `SessionMemory.close`."""
        with self.lock:
            self._device.leave(self)

    def settle(self) -> None:
        """Follow the memory pressure; see `SessionMemory.settle`."""
        with self.lock:
            self._device.breathe()

    def release(self) -> None:
        """Mark everything as unused; see `SessionMemory.release`."""
        self._count_ahead()
        self._device.release()

    def use(self, handles: Sequence[int], wanted_bytes: int = 0) -> None:
        """Restore values and make room; see `SessionMemory.use`."""
        self._device.use(self, self._places_of(handles), wanted_bytes)

    def with_room_to_put(self, put: Put) -> Put:
        """Make room first, and put again if the device is out of memory; see `SessionMemory.with_room_to_put`."""
        def put_with_room(tensor: torch.Tensor) -> torch.Tensor:
            self._device.use(self, (), tensor.numel() * tensor.element_size())
            return self._device.with_relief(lambda: put(tensor))

        return put_with_room

    def uploaded(self, handle: int) -> None:
        """Note a weight, and the upload that it can be reloaded from; see `SessionMemory.uploaded`."""
        place = self.places.at(handle)
        if place is None:
            return
        self.places.grant(place, Role.WEIGHT)
        kept = None if self._uploads is None else self._uploads.kept(handle)
        if kept is not None and kept.numel() * kept.element_size() == place.size_bytes:
            place.host = bytes_of(kept)

    def stated(self, value: torch.Tensor, role: str) -> None:
        """Note a role; the program that runs may have made the value. See `SessionMemory.stated`."""
        place = self.places.of(value)
        if place is not None:
            self.places.state(place, Role(role))
        elif value.layout is torch.strided:
            self._stated[value.untyped_storage()._cdata] = Role(role)

    def dropping(self, handles: Sequence[int]) -> None:
        """Note that the uploads behind these values will no longer be kept; see `SessionMemory.dropping`."""
        if self._uploads is not None:
            for handle in handles:
                place = self.places.at(handle)
                if place is not None and place.host is not None and self._uploads.kept(handle) is not None:
                    self._device.moved_to_host(place)

    def storages(self) -> Sequence[torch.UntypedStorage]:
        """List the storages; see `djinn_plugins.common.kinds.memory.SupportsEviction.storages`."""
        return [place.storage for place in self.places.entries]

    def evict(self, storage: torch.UntypedStorage) -> bool:
        """Evict a storage; see `djinn_plugins.common.kinds.memory.SupportsEviction.evict`."""
        place = self.places.holding(storage)
        return place is not None and self._device.evict(place)

    def explain(self, error: BaseException) -> BaseException:
        """Count a lack of memory, and add what the device holds to PyTorch's errors; see `SessionMemory.explain`."""
        device = self._device
        device.accounts.refused += isinstance(error, OutOfMemoryError) or is_out_of_memory(error)
        if not is_out_of_memory(error):
            return error
        return OutOfMemoryError(
            f"{str(error).splitlines()[0]} The limit is {device.limit_bytes} bytes; the device holds "
            f"{device.accounts.described()}.", hint="Let go of tensors, or work in smaller pieces.")

    # Runs ahead.

    def has_room_ahead(self) -> bool:
        """Whether memory is not short; see `SessionMemory.has_room_ahead`."""
        return self._device.fits_ahead(0)

    def begin_run_ahead(self, run: Run, inputs: Sequence[Any]) -> bool:
        """Whether all inputs are on the device, and results fit; see `SessionMemory.begin_run_ahead`."""
        places = [place for value in inputs if (place := self.places.of(value)) is not None]
        if any(place.state is not State.HERE for place in places) or not self._device.fits_ahead(
            self._cost_of(run).wanted_bytes
        ):
            return False
        self._device.use(self, places, 0)
        return True

    def drop_ahead(self) -> int:
        """Drop results that the client has not requested, and return how many bytes they used."""
        size_bytes = self._ahead_bytes
        self._ahead.shed()
        self._count_ahead()
        return size_bytes

    def _count_ahead(self) -> None:
        found: dict[int, int] = {}
        for value in self._ahead.results:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and self.places.of(value) is None:
                storage = value.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        size_bytes = sum(found.values())
        self._device.accounts.ahead_bytes += size_bytes - self._ahead_bytes
        self._ahead_bytes = size_bytes

    # Runs.

    def with_room_to_run(self, execute: Execute) -> Execute:
        """Restore inputs, make room for results, and run; see `SessionMemory.with_room_to_run`."""
        def execute_with_room(known: DefinedProgram, run: Run) -> list[Any]:
            self._count_ahead()
            self._stated.clear()
            numbers = messages.from_wire(run.numbers)
            inputs = [self.places.get(handle) for handle in run.inputs]
            wanted_bytes = self._bytes_wanted_by(known, run, inputs, numbers)
            effects = _effects_of(known.program, numbers, len(inputs))
            written = {place for index in effects.written if (place := self.places.at(run.inputs[index])) is not None}
            # Also if there is no room now: it must not run ahead then.
            self._note_cost(run, _Cost(wanted_bytes))
            self._device.use(self, self._places_of(run.inputs), wanted_bytes, written=written)
            began_s, before_ns = self._device.clock(), paused_ns()
            try:
                return execute(known, run)
            finally:
                took_s = self._device.clock() - began_s - (paused_ns() - before_ns) / 1e9
                self._note_cost(run, _Cost(wanted_bytes, took_s))
                self._device.release()
                if effects.changes_storages:
                    self.places.recount()

        return execute_with_room

    def made(self, known: DefinedProgram, run: Run, outputs: Sequence[Any], *, is_complete: bool) -> None:
        """Count the results, and learn what can be computed again; see `SessionMemory.made`."""
        assert known.program is not None, run.program
        self._count_ahead()
        places, numbers = self.places, messages.from_wire(run.numbers)
        inputs = [places.get(handle) for handle in run.inputs]
        read = [places.at(handle) for handle in run.inputs]
        made = {index: place for index, place in enumerate(map(places.enter_new, outputs)) if place is not None}
        try:
            if is_complete:
                self._learn_recipe(run, known.program, numbers, inputs, read, made)
            self._learn_caches(known.program, read, [places.of(value) for value in outputs])
            for place in made.values() if self._stated else ():
                if (role := self._stated.get(place.storage._cdata)) is not None:
                    places.state(place, role)
            self._bound(run, {place for place in read if place is not None}, made, is_complete=is_complete)
        except OutOfMemoryError:
            places.leave_unused(made.values())
            raise

    def _cost_of(self, run: Run) -> _Cost:
        return self._costs.get(run.program, _Cost())

    def _note_cost(self, run: Run, cost: _Cost) -> None:
        self._costs.pop(run.program, None)
        self._costs[run.program] = cost
        if len(self._costs) > MAX_COSTS:
            del self._costs[next(iter(self._costs))]

    def _places_of(self, handles: Iterable[int]) -> list[ManagedStorage]:
        return [place for handle in handles if (place := self.places.at(handle)) is not None]

    def _bytes_wanted_by(self, known: DefinedProgram, run: Run, inputs: Sequence[Any], numbers: Sequence[Any]) -> int:
        """Return how much memory a run needs in addition to its inputs, as far as it can be known."""
        checked = known.checked
        if not isinstance(checked, SupportsSizing):
            return self._cost_of(run).wanted_bytes
        checked.refused(inputs, numbers)
        wanted_bytes = checked.taken_bytes
        if self._device.accounts.held_bytes + wanted_bytes > self._device.limit_bytes:
            # For a loop, the known value is an upper bound; measuring may give less.
            wanted_bytes = checked.measure(inputs, numbers)
        return wanted_bytes

    def _bound(
        self, run: Run, read: set[ManagedStorage], made: dict[int, ManagedStorage], *, is_complete: bool,
    ) -> None:
        """Check that the results of a run fit, because their size was not known before."""
        cost, size_bytes = self._cost_of(run), sum(place.size_bytes for place in set(made.values()))
        self._note_cost(run, attrs.evolve(cost, wanted_bytes=max(cost.wanted_bytes, size_bytes)))
        needed_bytes = sum(place.size_bytes for place in read)
        if (made or is_complete) and size_bytes + needed_bytes > self._device.limit_bytes:
            raise self._device.no_room(size_bytes, needed_bytes)
        self._device.fit()

    def _learn_recipe(
        self, run: Run, program: CompiledProgram, numbers: Sequence[Any], inputs: Sequence[Any],
        read: Sequence[ManagedStorage | None], made: dict[int, ManagedStorage],
    ) -> None:
        """Remember how storages were computed, if the computation can be repeated."""
        now = self._device.clock()
        for place in read:
            if place is not None:
                place.used_at = now
        if not made or not isinstance(program, SupportsSpeculation) or not program.is_pure(numbers):
            return
        for place in made.values():
            self.places.grant(place, Role.ACTIVATION)
        if not isinstance(program, SupportsEffectReport) or not program.effects.repeats or any(
            isinstance(value, Poisoned) or (isinstance(value, torch.Tensor) and place is None)
            for value, place in zip(inputs, read, strict=True)
        ):
            return
        cost = self._cost_of(run)
        recipe = Recipe(
            program, numbers, [weakref.ref(value) if isinstance(value, torch.Tensor) else value for value in inputs],
            [(place, place.writes) for place in dict.fromkeys(read) if place is not None], cost.wanted_bytes,
            cost.duration_s)
        for index, place in made.items():
            # Several results may lie in one storage; any of them is enough to restore all of it.
            if place.recipe is not recipe:
                recipe.made[index] = place
                place.recipe = recipe

    def _learn_caches(
        self, program: CompiledProgram, read: Sequence[ManagedStorage | None], results: Sequence[ManagedStorage | None]
    ) -> None:
        """Recognize KV caches by how storages grow and by which operations read them."""
        if not isinstance(program, SupportsEffectReport):
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

    def _is_cache(self, place: ManagedStorage) -> None:
        self.places.grant(place, Role.KV_CACHE)
        self.decoded_at = self._device.clock()


def _effects_of(program: CompiledProgram | None, numbers: Sequence[Any], inputs: int) -> Effects:
    """Return the effects that a run may have on its inputs."""
    is_pure = isinstance(program, SupportsSpeculation) and program.is_pure(numbers)
    if is_pure:
        return Effects()
    if isinstance(program, SupportsEffectReport):
        return program.effects
    return Effects(written=frozenset(range(inputs)), changes_storages=True)
