"""A device that computes asynchronously: whose time it is, and who is charged for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import attrs
import pytest

from djinn.ir.phase import ExecutionPhase
from djinn.wire.messages import Batch, Run
from djinn_plugins.executor.pauses import reason_to_stop
from djinn_plugins.server import device_clock
from djinn_plugins.server.board import Board, mark_of
from djinn_plugins.server.kinds.metrics import Counts
from djinn_plugins.server.run_queue import RunQueue
from djinn_plugins.server.session_slot import SessionSlot

RUN = Run(1, (), [], ())
NAMES = ("a" * 32, "b" * 32)


class Device:
    """Works on what is submitted, one after another, as its own clock goes on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ready_s = 0.0
        self.is_lost = False
        self.marks = self.waits = 0

    def submit(self, seconds: float) -> None:
        self.ready_s = max(self.ready_s, self.now_s) + seconds

    def mark(self) -> Mark:
        self.check()
        self.marks += 1
        self.ready_s = max(self.ready_s, self.now_s)
        return Mark(self, self.ready_s)

    def check(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")


@attrs.frozen
class Mark:
    device: Device
    at_s: float

    def query(self) -> bool:
        self.device.check()
        return self.device.now_s >= self.at_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)
        self.device.waits += 1

    def elapsed_time(self, later: Mark) -> float:
        return (later.at_s - self.at_s) * 1e3


@attrs.frozen
class Turns:
    """Whether more was wanted, each time that a turn was given back."""

    given_back: list[bool]

    def ask(self) -> None:
        """There is somebody who grants turns."""

    def give_back(self, turn: int, *, wants_more: bool) -> None:
        self.given_back.append(wants_more)


class Bench:
    """A line on such a device, with two sessions."""

    def __init__(self) -> None:
        self.device = Device()
        self.board, descriptor = Board.create()
        os.close(descriptor)
        self.line = RunQueue(board=self.board, mark=self.device.mark)
        self.places = [self.line.open() for _ in NAMES]
        for place, name in zip(self.places, NAMES, strict=True):
            place.mark = mark_of(name, bytes(32), "")

    def run(self, place: SessionSlot, device_s: float, program: str = "", phase: ExecutionPhase | None = None) -> None:
        place.received(Batch([RUN], phase=phase))
        place.begin()
        place.program = program
        self.device.submit(device_s)
        place.end()
        place.carried_out()

    def pass_until(self, now_s: float) -> None:
        self.device.now_s = now_s
        self.line.look()

    @property
    def computed(self) -> str:
        running = self.board.read()
        return "" if running is None else running.session

    @property
    def used_s(self) -> float:
        return self.line.counts(Counts()).device_ns / 1e9


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    # The thread of the line looks at the same device, whose clock stands still meanwhile; it only looks more rarely.
    monkeypatch.setattr(device_clock, "LOOK_S", 0.05)
    made = Bench()
    yield made
    made.line.close()


def test_sessions_are_charged_for_what_the_device_computes(bench: Bench) -> None:
    huge, small = bench.places
    bench.run(huge, 10.0)
    bench.run(small, 0.5)
    assert bench.used_s < 1, "submitting takes no time"
    bench.pass_until(9.9)
    assert bench.used_s < 1
    bench.pass_until(10.0)
    assert bench.used_s == pytest.approx(10.0, abs=0.5)
    bench.pass_until(10.5)
    assert bench.used_s == pytest.approx(10.5, abs=1e-3)
    assert huge.finish == pytest.approx(10.0, abs=0.1)
    assert small.finish == pytest.approx(0.5, abs=0.1)


def test_a_program_is_charged_what_the_device_computes(bench: Bench) -> None:
    first, second = bench.places
    bench.run(first, 3.0, "mm", ExecutionPhase.LLM_DECODE)
    bench.run(second, 1.0, "sum")
    bench.run(second, 0.5)
    assert bench.line.slowest_programs() == ()
    bench.pass_until(3.5)
    bench.run(first, 2.0, "mm")
    bench.pass_until(7.0)
    found = [(each.name, each.phase, each.runs, each.total_ns / 1e9, each.longest_ns / 1e9)
             for each in bench.line.slowest_programs()]
    assert found == [("mm", "llm_decode", 2, pytest.approx(5), pytest.approx(3)),
                     ("sum", "unknown", 1, pytest.approx(1), pytest.approx(1))]


def test_what_others_compute_while_a_program_pauses_is_not_charged(bench: Bench) -> None:
    place, device, turns = bench.places[0], bench.device, list[bool]()
    line = bench.line = RunQueue(Turns(turns), board=bench.board, mark=device.mark)
    line.granted(1)
    place = line.open()
    place.mark = mark_of(NAMES[0], bytes(32), "")
    place.received(Batch([RUN]))
    place.begin()
    place.program = "mm"
    device.submit(3.0)
    line.recalled(1, 0.0)
    thread = threading.Thread(target=lambda: reason_to_stop(place.breaks), daemon=True)
    thread.start()
    while not turns:
        pass
    bench.pass_until(3.0)
    assert bench.used_s == pytest.approx(3.0, abs=0.1)
    assert bench.computed == "", "nothing of it is computed"
    device.submit(10.0)
    bench.pass_until(13.0)
    line.granted(2)
    thread.join(10)
    assert bench.computed == NAMES[0]
    device.submit(1.0)
    place.end()
    bench.pass_until(14.0)
    line.close()
    (found,) = line.slowest_programs()
    assert (found.runs, found.total_ns / 1e9) == (1, pytest.approx(4.0))
    assert bench.used_s == pytest.approx(4.0, abs=0.1)


@pytest.mark.parametrize(("step_s", "most_ahead_s"), [(0.05, 0.15), (2e-3, 0.02), (2e-5, 0.025)])
def test_a_program_is_submitted_as_little_ahead_of_the_device_as_keeps_it_busy(
    bench: Bench, step_s: float, most_ahead_s: float,
) -> None:
    device, line = bench.device, RunQueue(Turns([]), mark=bench.device.mark)
    line.granted(1)
    place, ahead_s, steps = line.open(), list[float](), 2000
    for _ in range(2):
        place.received(Batch([RUN]))
        place.begin()
        for step in range(steps):
            if place.breaks:
                assert reason_to_stop(place.breaks) is None
            if step % 20 == 0:
                line.look()
            assert device.now_s < device.ready_s or not ahead_s, "the device has something to do"
            device.submit(step_s)
            ahead_s.append(device.ready_s - device.now_s)
        place.end()
        place.carried_out()
    line.close()
    assert max(ahead_s[100:]) <= most_ahead_s, "only until it was seen that the device is slower"
    assert device.waits > 0
    assert device.marks < (2.5 if step_s > 1e-3 else 0.1) * steps * 2


def test_a_device_that_keeps_up_is_not_waited_for(bench: Bench) -> None:
    device, line = bench.device, RunQueue(Turns([]), mark=bench.device.mark)
    line.granted(1)
    place = line.open()
    place.received(Batch([RUN]))
    place.begin()
    for _ in range(100):
        line.look()
        assert reason_to_stop(place.breaks) is None
        assert place.breaks == []
        device.submit(1e-3)
        device.now_s = device.ready_s
    place.end()
    line.close()
    assert device.waits == 0


def test_the_next_program_is_that_of_whoever_has_used_the_device_less(bench: Bench) -> None:
    huge, small = bench.places
    bench.run(huge, 10.0)
    bench.run(small, 0.5)
    bench.pass_until(10.5)
    holder = bench.line.open()
    holder.received(Batch([RUN]))
    holder.begin()
    said: list[str] = []

    def work(place: SessionSlot, name: str) -> None:
        place.received(Batch([RUN]))
        place.begin()
        said.append(name)
        place.end()

    threads = []
    for count, (place, name) in enumerate(((huge, "huge"), (small, "small")), 1):
        threads.append(threading.Thread(target=work, args=(place, name)))
        threads[-1].start()
        while bench.line.queued < 1 + count or len(holder.kind.waiting) < count:
            pass
    holder.end()
    for thread in threads:
        thread.join(10)
    assert said == ["small", "huge"]


def test_the_board_shows_what_the_device_computes_until_it_has_finished(bench: Bench) -> None:
    first, second = bench.places
    bench.run(first, 3.0)
    bench.run(second, 2.0)
    assert bench.computed == NAMES[0]
    bench.pass_until(2.9)
    assert bench.computed == NAMES[0]
    bench.pass_until(3.0)
    assert bench.computed == NAMES[1]
    bench.pass_until(5.0)
    assert bench.computed == ""


def test_a_session_runs_as_long_as_its_kernels_do(bench: Bench) -> None:
    first, second = bench.places
    bench.run(first, 3.0)
    bench.run(second, 1.0)
    running = bench.board.read()
    assert running is not None
    assert running.age_s < 5
    later = running.began_ns / 1e9 + 100
    assert first.running_s(later) == pytest.approx(100, abs=0.01)
    assert second.running_s(later) == 0
    bench.pass_until(4.0)
    assert first.running_s(later) == second.running_s(later) == 0


def test_a_program_runs_from_when_the_one_before_has_finished(bench: Bench) -> None:
    first, second = bench.places
    bench.run(first, 3.0)
    bench.run(second, 1.0)
    submitted_ns = time.monotonic_ns()
    bench.pass_until(3.0)
    running = bench.board.read()
    assert running is not None
    assert running.began_ns > submitted_ns


def test_a_device_that_is_lost_is_not_waited_for(bench: Bench) -> None:
    first, second = bench.places
    bench.run(first, 3.0)
    bench.device.is_lost = True
    bench.pass_until(1.0)
    assert bench.computed == ""
    bench.run(second, 1.0)
    assert bench.computed == ""
