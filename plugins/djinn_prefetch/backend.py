"""A backend that fetches in one round trip what a program asks for in many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
from djinn_lib_schedule.placing import SupportsPlacement
from djinn_lib_schedule.wrapping import BackendWrapper, PlacingWrapper

from djinn.errors import DjinnError
from djinn.ir.program import ProgramLayout
from djinn.ir.tape import Node, Tape
from djinn.ir.value import Slot
from djinn.kinds import Backend, Connection, OpenBackend, SubmissionCache
from djinn.record.tensor import LazyTensor
from djinn_prefetch.callers import Place, ReadAhead, read_ahead
from djinn_prefetch.fetched import FetchedValues, Key, is_plain_view, key_of

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

    The cache is valid until an operation is recorded that is more than a view. All of it is dropped then.

    Args:
        plain: The backend that does the work.
        tape: The session's tape.
        released: Numbers of values that the program no longer refers to; identifies the session's tensors.
        limit_bytes: Size of the cache.

    Concurrency:
        The caller holds the session's lock.

    Laws:
        session.prefetch_exact
    """

    def __init__(self, plain: Backend, tape: Tape, released: deque[int], limit_bytes: int) -> None:
        super().__init__(plain)
        self._tape = tape
        self._released = released
        self._limit_bytes = limit_bytes
        self._cache = FetchedValues()
        self._last: tuple[Place, Key] | None = None
        self._pauses: dict[Place, _Pause] = {}
        self._fetched = 0
        self._fetched_at: Place | None = None
        """The place for which the cache was filled, if it was not certain to be used."""
        self._has_failed = False
        """Whether an operation has failed: values may be lost whose loss was reported already."""
        self._unheard: deque[Exception] = deque()

    def fetch(self, slots: Sequence[Slot], *, whole: bool) -> list[Any]:
        """Fetch values, or take them from the cache."""
        if self._unheard:
            raise self._unheard.popleft()
        if self._cache and not all(map(is_plain_view, tuple(self._tape.nodes))):
            self._drop()
        is_at_rest = len(slots) == 1 and not self._is_computed_now(slots[0])
        ask = read_ahead(slots[0], self._last, self._is_dull) if is_at_rest else None
        if ask is None:
            self._drop()
            return self._asked(lambda: self.plain.fetch(slots, whole=whole))
        self._last = ask.place, ask.key
        if ask.key in self._cache:
            value = self._cache.use(ask.key)
            if not self._cache:
                self._noted(ask.place, useful=True)
            return [value]
        return self._fetch_with_next(slots[0], ask, whole=whole)

    def flush(self) -> None:
        """Send everything pending; the cache stays valid if there are only views."""
        pending = tuple(self._tape.nodes)
        before = self.nodes_taken
        if self._cache and not all(map(is_plain_view, pending)):
            self._drop()
        self.plain.flush()
        if self.nodes_taken - before != len(pending):
            self._drop()

    def describe(self, slots: Sequence[Slot]) -> list[Any]:
        """Send everything pending and fetch the metadata of values."""
        self._drop()
        return self._asked(lambda: self.plain.describe(slots))

    def synchronize(self) -> None:
        """Send everything pending and wait until it has run."""
        self._drop()
        if self._unheard:
            raise self._unheard.popleft()
        self._asked(self.plain.synchronize)

    def upload(self, number: int, dense: torch.Tensor, device: torch.device | None = None) -> None:
        """Send a dense CPU tensor."""
        self._drop()
        self.plain.upload(number, dense, device)

    def seed(self, seed: int) -> None:
        """Seed the random numbers, after everything pending."""
        self._drop()
        self.plain.seed(seed)

    def run(self, nodes: Sequence[Node], released: set[int], layout: ProgramLayout) -> None:
        """Run a segment again that was recorded before."""
        self._drop()
        self.plain.run(nodes, released, layout)

    def use_cache(self, open_cache: Callable[[], SubmissionCache]) -> None:
        """Drop the caches of results, and use others."""
        self._drop()
        self.plain.use_cache(open_cache)

    def cancel(self) -> None:
        """Cancel the submitted work that has not begun: values may be lost without another report."""
        self._drop()
        self._has_failed = True
        self.plain.cancel()

    def stats(self) -> Mapping[str, int]:
        """Return the counters, and those of values fetched in advance."""
        return {**self.plain.stats(), "prefetched": self._cache.fetched, "prefetched_bytes": self._cache.fetched_bytes,
                "prefetched_unused": self._cache.unused, "prefetched_unused_bytes": self._cache.unused_bytes}

    def close(self) -> None:
        """Close the connections."""
        self._drop()
        self.plain.close()

    def _is_computed_now(self, slot: Slot) -> bool:
        nodes = self._tape.nodes
        last = nodes[-1] if nodes else None
        return last is not None and slot in last.outputs and not is_plain_view(last)

    def _fetch_with_next(self, slot: Slot, ask: ReadAhead, *, whole: bool) -> list[Any]:
        pending = tuple(self._tape.nodes)
        before = self.nodes_taken
        next_slots, keys, uses = self._next(ask, pending, whole=whole)
        if not keys:
            self._noted(ask.place, useful=False)
        if self._has_failed:
            values = self._asked(lambda: self.plain.fetch([slot], whole=whole))
            more = self._fetch_cautiously(next_slots)
        else:
            answer = self._asked(lambda: self.plain.fetch([slot, *next_slots], whole=whole))
            values, more = answer[:1], answer[1:]
        if self._cache and self.nodes_taken - before != len(pending):
            self._drop()
        if more:
            self._cache.keep(keys, more, uses)
            self._fetched_at, self._fetched = None if ask.is_certain else ask.place, len(more)
        return values

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
        if not slots or self._tape.nodes:
            return []
        before = self.nodes_taken
        try:
            return self.plain.fetch(slots, whole=False)
        except DjinnError:
            raise
        except Exception as failure:  # noqa: BLE001  # of an operation; raised again at the next wait if it is news
            if self.nodes_taken != before:
                # Another thread recorded what has failed now: nobody has heard of it.
                self._unheard.append(failure)
            return []

    def _asked(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except DjinnError:
            self._drop()
            raise
        except Exception:
            self._drop()
            self._has_failed = True
            raise

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


class PlacingPrefetchingBackend(PrefetchingBackend, PlacingWrapper):
    """The same for several executors."""


def open_prefetching(opens: OpenBackend, limit_bytes: int, connections: Sequence[Connection], tape: Tape,
                     released: deque[int]) -> Backend:
    """Open a backend, and wrap it."""
    plain = opens(connections, tape, released)
    kind = PlacingPrefetchingBackend if isinstance(plain, SupportsPlacement) else PrefetchingBackend
    return kind(plain, tape, released, limit_bytes)
