"""A backend that fetches in one round trip what a program asks for in many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import attrs
import torch

from djinn.errors import DjinnError
from djinn.ir.program import ProgramLayout
from djinn.ir.tape import Node, Tape
from djinn.ir.value import Slot
from djinn.kinds import Backend, BackendContext, Connection, OpenBackend, SubmissionCache
from djinn.kinds.backend_wrapper import BackendWrapper
from djinn.record.tensor import LazyTensor
from djinn_plugins.client.prefetch.callers import ReadAhead, read_ahead
from djinn_plugins.client.prefetch.continuations import Continuations, ForeseenValue, Place, place_of
from djinn_plugins.client.prefetch.fetched import FetchedValues, Key, changes_nothing, is_computed_now, key_of, read_by
from djinn_plugins.client.prefetch.history import History
from djinn_plugins.client.wishes import Wishes
from djinn_plugins.common.tracing.callers import program_frame
from djinn_plugins.common.tracing.waits import WaitLedger

__all__ = ("PrefetchingBackend", "open_prefetching")

_T = TypeVar("_T")
MAX_PLACES = 1024
"""Places of programs that are remembered."""
MAX_PAUSE = 256
"""How many waits at a place pass, at most, until its callers are looked at again."""


@attrs.define
class _Pause:
    """How often looking at a place's callers was in vain, and how many waits are still left to pass."""

    length: int = 0
    left: int = 0


class PrefetchingBackend(BackendWrapper):
    """Fetches, with a value, those that its caller will ask for next, and caches them until they are asked for.

    The cache is valid until an operation is recorded that is more than a view or ``item()``. All of it is dropped then.
    Values that are computed in advance have rules of their own: see `Continuations`.

    Args:
        plain: The backend that does the work.
        tape: The session's tape.
        released: Numbers of values that the program no longer refers to; identifies the session's tensors.
        freed: Those of them that the wrapped backend may free.
        context: What the session's layers share, and what gives numbers to values.
        limit_bytes: Size of the cache.

    Concurrency:
        The caller holds the session's lock.

    Laws:
        session.prefetch_exact
    """

    def __init__(self, plain: Backend, tape: Tape, released: deque[int], freed: deque[int],
                 context: BackendContext, limit_bytes: int) -> None:
        super().__init__(plain)
        self._tape = tape
        self._released = released
        self._freed = freed
        self._limit_bytes = limit_bytes
        self._ledger = context.shared(WaitLedger)
        self._wishes = context.shared(Wishes)
        self._cache = FetchedValues()
        self._history = History()
        self._continuations = Continuations(context.numbers, self._history)
        self._foreseen = 0
        """Nodes on or off the tape that the program has not recorded."""
        self._followed = 0
        """How many nodes had been taken when the history was complete."""
        self._unfollowed = 0
        """How many pending nodes may use values whose death the history has forgotten."""
        self._last: tuple[Place, Key] | None = None
        self._pauses: dict[Place, _Pause] = {}
        self._fetched = 0
        self._fetched_at: Place | None = None
        """The place for which the cache was filled, if it was not certain to be used."""
        self._has_failed = False
        """Whether an operation has failed: values may be lost whose loss was reported already."""
        self._unheard: Exception | None = None
        """A failure that occurred while only this layer asked."""

    @property
    def nodes_taken(self) -> int:
        """Nodes that were taken off the tape, of those that the program recorded."""
        return self.plain.nodes_taken - self._foreseen

    @nodes_taken.setter
    def nodes_taken(self, count: int) -> None:
        self.plain.nodes_taken = count + self._foreseen

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values, or take them from the cache."""
        self._raise_unheard()
        pending = tuple(self._tape.nodes)
        if self._cache and not all(map(changes_nothing, pending)):
            self._drop()
        caller = program_frame()
        if caller is None or len(slots) != 1 or self._wishes.are_refused:
            self._changed()
            with self._taking(pending, whole=whole):
                return self._asked(lambda: self.plain.fetch(slots, whole=whole))
        place = place_of(caller)
        expected = self._continuations.answer(place, slots[0], pending, self.nodes_taken)
        if expected is not None:
            return [expected.value]
        with self._ledger.waiting(caller), self._taking(pending, whole=whole):
            return self._fetch_one(slots[0], caller, place, pending, whole=whole)

    def flush(self) -> None:
        """Send everything pending; the cache stays valid if there are only views."""
        pending = tuple(self._tape.nodes)
        before = self.nodes_taken
        if self._cache and not all(map(changes_nothing, pending)):
            self._drop()
        with self._taking(pending):
            self.plain.flush()
        self._continuations.sent(pending, before, self.nodes_taken)
        if self.nodes_taken - before != len(pending):
            self._drop()

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values."""
        self._changed()
        with self._taking(self._tape.nodes):
            return self._asked(lambda: self.plain.describe(slots))

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._changed()
        self._raise_unheard()
        with self._taking(self._tape.nodes):
            self._asked(self.plain.synchronize)

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor."""
        self._drop()
        self._free_released()
        self.plain.upload(number, dense, device)

    def seed(self, seed: int) -> None:
        """Seed the random numbers, after everything pending."""
        self._changed()
        with self._taking(self._tape.nodes):
            self.plain.seed(seed)

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a segment again that was recorded before."""
        self._changed()
        with self._taking(self._tape.nodes):
            self.plain.run(nodes, released, layout)
        # What these nodes write is not followed.
        self._history.clear()

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Drop the caches of results, and use others."""
        self._changed()
        with self._taking(self._tape.nodes):
            self.plain.use_cache(open_cache)

    def cancel(self) -> None:
        """Cancel the submitted work that has not begun: values may be lost without another report."""
        self._changed()
        self._has_failed = True
        self.plain.cancel()

    def stats(self) -> Mapping[str, int]:
        """Return the counters, and those of values fetched in advance."""
        at_rest, foreseen = self._cache, self._continuations
        return {**self.plain.stats(), "prefetched": at_rest.fetched + foreseen.fetched,
                "prefetched_bytes": at_rest.fetched_bytes + foreseen.fetched_bytes,
                "prefetched_unused": at_rest.unused + foreseen.unused,
                "prefetched_unused_bytes": at_rest.unused_bytes + foreseen.unused_bytes}

    def close(self) -> None:
        """Close the connections."""
        self._drop()
        self.plain.close()

    def _raise_unheard(self) -> None:
        if self._unheard is not None:
            failure, self._unheard = self._unheard, None
            raise failure

    @contextmanager
    def _taking(self, pending: Sequence[Node], *, whole: bool = True) -> Iterator[None]:
        """Let the wrapped backend take the tape, and add its nodes to the history; clear that if any were missed."""
        self._free_released()
        before, count = self.nodes_taken, len(pending)
        if before != self._followed:
            self._history.clear()
            self._unfollowed = count
        if whole:
            self._history.add(pending[self._unfollowed:])
            self._unfollowed = 0
        try:
            yield
        finally:
            self._followed = self.nodes_taken
            if not whole or self._followed - before != count:
                self._history.clear()
                self._unfollowed = len(self._tape)

    def _free_released(self) -> None:
        """Pass the released values to the wrapped backend, which may free them."""
        released = self._released
        # Not more than there are now: values may die meanwhile.
        numbers = [released.popleft() for _ in range(len(released))]
        self._history.died(numbers)
        for number in numbers:
            self._wishes.died(number)
        self._freed.extend(numbers)

    def _fetch_one(self, slot: Slot, caller: FrameType, place: Place, pending: Sequence[Node], *,
                   whole: bool) -> list[Any]:
        source = read_by(self._tape.nodes, slot)
        is_at_rest = not is_computed_now(self._tape.nodes, source)
        ask = read_ahead(source, caller, place, self._last, self._is_dull) if is_at_rest else None
        if ask is None:
            self._drop()
            return self._fetch_with_foreseen(slot, place, pending, (), whole=whole)
        self._last = place, ask.key
        if ask.key in self._cache:
            value = self._cache.use(ask.key)
            if not self._cache:
                self._noted(place, useful=True)
            return [value if source is slot else value.item()]
        if source is not slot:
            ask = attrs.evolve(ask, tensors=tuple(tensor for tensor in ask.tensors if tensor.numel() == 1))
        return self._fetch_with_next(slot, ask, pending, whole=whole)

    def _fetch_with_next(self, slot: Slot, ask: ReadAhead, pending: Sequence[Node], *, whole: bool) -> list[Any]:
        before = self.nodes_taken
        next_slots, keys, uses = self._next(ask, pending, whole=whole)
        if not keys:
            self._noted(ask.place, useful=False)
        if self._has_failed:
            values = self._fetch_with_foreseen(slot, ask.place, pending, (), whole=whole)
            more = [] if self._tape.nodes else self._fetch_cautiously(next_slots)
        else:
            answer = self._fetch_with_foreseen(slot, ask.place, pending, next_slots, whole=whole)
            values, more = answer[:1], answer[1:]
        if self._cache and self.nodes_taken - before != len(pending):
            self._drop()
        if more:
            self._cache.keep(keys, more, uses)
            self._fetched_at, self._fetched = None if ask.is_certain else ask.place, len(more)
        return values

    def _fetch_with_foreseen(self, slot: Slot, place: Place, pending: Sequence[Node], more: Sequence[Slot], *,
                             whole: bool) -> list[Any]:
        """Fetch values, and those that the program asked for next when it last was here."""
        slots, before = [slot, *more], self.nodes_taken
        if not whole:
            self._continuations.forget()
            return self._asked(lambda: self.plain.fetch(slots, whole=False))
        foreseen = self._continuations.foresee(place, slot, pending, before, is_apart=self._has_failed)
        wanted = [one.operations.wanted for one in foreseen]
        if self._has_failed:
            answer = self._asked(lambda: self.plain.fetch(slots, whole=True))
            if wanted and not self._tape.nodes:
                with self._added(foreseen):
                    answer += self._fetch_cautiously(wanted)
        else:
            wished = self._wishes.slots
            with self._added(foreseen):
                answer = self._asked(lambda: self.plain.fetch([*slots, *wanted, *wished], whole=True))
            self._wishes.values = [answer.pop() for _ in wished][::-1]
        arrived = answer[len(slots):]
        self._continuations.arrived(answer[0], foreseen[:len(arrived)], arrived, self.nodes_taken,
                                    is_exact=self.nodes_taken - before == len(pending))
        return answer[:len(slots)]

    @contextmanager
    def _added(self, foreseen: Sequence[ForeseenValue]) -> Iterator[None]:
        """Let operations be on the tape while it is sent; their results are released then."""
        nodes = [node for one in foreseen for node in one.nodes]
        self._tape.nodes.extend(nodes)
        self._foreseen += len(nodes)
        try:
            yield
        finally:
            for node in nodes:
                if node in self._tape.nodes:
                    # The tape was not taken: it cannot be sent.
                    self._tape.nodes.remove(node)
                    self._foreseen -= 1
                else:
                    self._freed.extend(slot.number for slot in node.outputs)

    def _next(self, ask: ReadAhead, pending: Sequence[Node], *, whole: bool) -> tuple[list[Slot], list[Key], list[int]]:
        """Choose the values that are fetched with another."""
        room = self._limit_bytes - self._cache.size_bytes - ask.key[1].size_bytes
        if not ask.tensors or (pending and not whole):
            return [], [], []
        chosen: dict[Key, Slot] = {}
        uses: Counter[Key] = Counter()
        for tensor in ask.tensors:
            key = key_of(tensor)
            if key in chosen or key == ask.key:
                uses[key] += 1
            elif key not in self._cache and self._can_be_fetched(tensor):
                room -= key[1].size_bytes
                if room < 0:
                    break
                chosen[key] = tensor._value.slot
                uses[key] += 1
        return list(chosen.values()), list(chosen), [uses[key] for key in chosen]

    def _can_be_fetched(self, tensor: LazyTensor) -> bool:
        owner = getattr(tensor._value.released, "__self__", None)
        with torch._C.DisableTorchFunctionSubclass():
            return owner is self._released and not tensor.is_conj() and not tensor.is_neg()

    def _fetch_cautiously(self, slots: Sequence[Slot]) -> list[Any]:
        """Fetch values separately, some of which may be lost; their loss has been reported before."""
        if not slots:
            return []
        before = self.nodes_taken
        try:
            return self.plain.fetch(slots, whole=False)
        except DjinnError:
            raise
        except Exception as failure:  # noqa: BLE001  # of an operation; raised again at the next wait if it is news
            if self.nodes_taken != before:
                # Another thread recorded what has failed now: it is unreported. Its frames hold tensors.
                self._unheard = failure.with_traceback(None)
            return []

    def _asked(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except DjinnError:
            self._changed()
            raise
        except Exception:
            self._changed()
            self._has_failed = True
            raise

    def _changed(self) -> None:
        """Drop everything fetched in advance, after an event that the tape does not show."""
        self._drop()
        self._continuations.forget()

    def _drop(self) -> None:
        if not self._cache:
            return
        if self._fetched_at is not None and len(self._cache) > self._fetched // 2:
            self._noted(self._fetched_at, useful=False)
        self._fetched_at = None
        self._cache.drop()

    def _is_dull(self, place: Place) -> bool:
        pause = self._pauses.get(place)
        if pause is None or not pause.left or self._cache:
            return False
        pause.left -= 1
        return True

    def _noted(self, place: Place, *, useful: bool) -> None:
        """Look at a place's callers less often while that is in vain."""
        if useful:
            self._pauses.pop(place, None)
            return
        if len(self._pauses) >= MAX_PLACES:
            self._pauses.clear()
        pause = self._pauses.setdefault(place, _Pause())
        pause.length = min(2 * pause.length + 1, MAX_PAUSE)
        pause.left = pause.length


def open_prefetching(opens: OpenBackend, context: BackendContext, limit_bytes: int, connections: Sequence[Connection],
                     tape: Tape, released: deque[int]) -> Backend:
    """Open a backend, and wrap it."""
    # Whether a value is alive is known here only if none is freed unseen.
    freed: deque[int] = deque()
    return PrefetchingBackend(opens(connections, tape, freed), tape, released, freed, context, limit_bytes)
