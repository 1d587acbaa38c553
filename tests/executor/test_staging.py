"""Staging memory, with a lane that copies on a thread of its own and lets the test say when."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from djinn_plugins.executor.cuda.staging import Ring, Staging

TIMEOUT_S = 10.0


class Passing:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.waits = 0

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.waits += 1
        assert self.done.wait(TIMEOUT_S)


class ThreadLane:
    """Copies in order, on a thread; while it is held, it copies only so that nobody waits for ever."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Passing]] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self._work: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, Passing] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Passing:
        passing = Passing()
        self.asked.append((len(source), passing))
        self._work.put((target, source, passing))
        return passing

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join(TIMEOUT_S)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            target, source, passing = item
            self.may_go.wait(TIMEOUT_S)
            target.copy_(source)
            passing.done.set()


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    made = ThreadLane()
    yield made
    made.may_go.set()
    made.stop()


class Memory:
    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.released: list[int] = []

    def allocate(self, length: int) -> torch.Tensor:
        self.allocated.append(length)
        return torch.zeros(length, dtype=torch.uint8)

    def release(self, memory: torch.Tensor) -> None:
        self.released.append(len(memory))


def staging(lane: ThreadLane, memory: Memory, length: int = 4096, piece: int = 1024) -> Staging:
    return Staging(lane, memory.allocate, memory.release, length=length, piece=piece)


def noise(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_source_may_change_at_once(lane: ThreadLane) -> None:
    lane.may_go.clear()
    source, target = noise(3000), torch.zeros(3000, dtype=torch.uint8)
    kept = source.clone()
    passing = staging(lane, Memory()).send(source, target)
    source.zero_()
    assert passing is not None
    assert not passing.query()
    lane.may_go.set()
    passing.synchronize()
    assert torch.equal(target, kept)


def test_nothing_is_waited_for_while_there_is_room(lane: ThreadLane) -> None:
    lane.may_go.clear()
    used = staging(lane, Memory())
    for _ in range(4):
        used.send(noise(1000), torch.zeros(1000, dtype=torch.uint8))
    assert [passing.waits for _, passing in lane.asked] == [0] * 4


def test_only_what_is_in_the_way_is_waited_for(lane: ThreadLane) -> None:
    lane.may_go.clear()
    used = staging(lane, Memory())
    for _ in range(4):
        used.send(noise(1024), torch.zeros(1024, dtype=torch.uint8))
    threading.Timer(0.05, lane.may_go.set).start()
    used.send(noise(1024), torch.zeros(1024, dtype=torch.uint8))
    assert [passing.waits for _, passing in lane.asked] == [1, 0, 0, 0, 0]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=12), up=st.lists(st.booleans(), min_size=12,
                                                                                    max_size=12))
def test_whatever_comes_arrives(lengths: list[int], up: list[bool]) -> None:
    lane, memory = ThreadLane(), Memory()
    used = staging(lane, memory)
    sent = []
    for number, (length, is_up) in enumerate(zip(lengths, up, strict=False)):
        source, target = noise(length, number), torch.zeros(length, dtype=torch.uint8)
        if is_up:
            sent.append((used.send(source, target), source, target))
        else:
            used.fetch(source, target)
            assert torch.equal(target, source)
    for passing, source, target in sent:
        if passing is not None:
            passing.synchronize()
        assert torch.equal(target, source)
    used.close()
    lane.stop()
    assert memory.allocated == memory.released == [4096]
    assert max((length for length, _ in lane.asked), default=0) <= 1024


def test_pieces_of_a_download_land_while_others_are_copied(lane: ThreadLane) -> None:
    used = staging(lane, Memory())
    source, target = noise(100_000), torch.zeros(100_000, dtype=torch.uint8)
    used.fetch(source, target)
    assert torch.equal(target, source)
    assert len(lane.asked) == 98


def test_memory_is_made_when_needed_and_given_back_when_free(lane: ThreadLane) -> None:
    memory = Memory()
    used = staging(lane, memory)
    used.close()
    assert memory.allocated == memory.released == []
    lane.may_go.clear()
    target = torch.zeros(10, dtype=torch.uint8)
    used.send(noise(10), target)
    threading.Timer(0.05, lane.may_go.set).start()
    used.close()
    assert torch.equal(target, noise(10))
    used.send(noise(10), target)
    assert memory.allocated == [4096, 4096]
    assert memory.released == [4096]


def test_pieces_must_fit_twice(lane: ThreadLane) -> None:
    with pytest.raises(ValueError, match="do not fit twice"):
        staging(lane, Memory(), length=4096, piece=2049)


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60), kept=st.integers(1, 8))
def test_parts_in_use_never_overlap(lengths: list[int], kept: int) -> None:
    """A copy passes when somebody waits for it, or when a few later ones have begun."""
    memory = torch.zeros(1000, dtype=torch.uint8)
    ring, busy = Ring(memory), []
    for length in lengths:
        part = ring.take(length)
        begin = part.data_ptr() - memory.data_ptr()
        assert len(part) == length
        busy = [entry for entry in busy if not entry[2].query() and not entry[2].waits]
        assert all(last <= begin or first >= begin + length for first, last, _ in busy)
        passing = _OnRequest()
        ring.lend(part, passing)
        busy.append((begin, begin + length, passing))
        if len(busy) > kept:
            busy[0][2].done.set()
    assert ring.busy <= len(lengths)


class _OnRequest(Passing):
    def synchronize(self) -> None:
        self.waits += 1
        self.done.set()
