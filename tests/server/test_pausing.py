"""A program that gives its turn back between two steps, and goes on."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import attrs
from support.servers.lines import RUN, Gateway, held, wait_for

from djinn.errors import DjinnError, LimitError
from djinn.ir.phase import ExecutionPhase
from djinn.wire.messages import Batch
from djinn_plugins.executor.pauses import reason_to_stop
from djinn_plugins.server.board import Board
from djinn_plugins.server.kinds.metrics import Counts
from djinn_plugins.server.run_queue import RunQueue
from djinn_plugins.server.session_slot import SessionSlot

DECODE = ExecutionPhase.LLM_DECODE


@attrs.define
class Pausing:
    """A program that gives its turn back between two steps, in a thread of its own, and what it was told then."""

    line: RunQueue
    gateway: Gateway
    board: Board
    place: SessionSlot
    stop: list[DjinnError] = attrs.field(factory=list)
    told: list[Any] = attrs.field(factory=list)
    thread: threading.Thread = attrs.field(init=False)

    @classmethod
    def begun(cls) -> Pausing:
        gateway = Gateway()
        board, descriptor = Board.create()
        os.close(descriptor)
        line = RunQueue(gateway, board=board)
        line.granted(1)
        made = cls(line, gateway, board, held(line))
        made.place.stop = made.stop
        made.place.program = "long"
        time.sleep(0.02)
        line.recalled(1, 0.0)
        made.thread = threading.Thread(target=made.step, daemon=True)
        made.thread.start()
        wait_for(lambda: gateway.said)
        return made

    def step(self) -> None:
        self.told.append(reason_to_stop(self.place.breaks))

    def has_gone_on(self) -> list[Any]:
        self.thread.join(10)
        return self.told


def test_a_program_gives_a_recalled_turn_back_between_two_steps_and_goes_on_with_the_next_one() -> None:
    pausing = Pausing.begun()
    line, place = pausing.line, pausing.place
    urgent = line.open()
    urgent.received(Batch([RUN], phase=DECODE))
    thread = threading.Thread(target=urgent.begin, daemon=True)
    thread.start()
    wait_for(lambda: line._waiting == 2)
    time.sleep(0.4)
    assert pausing.gateway.said == [(1, True)]
    assert pausing.told == []
    assert place.is_wanted
    assert 0.02 <= place.running_s(time.monotonic()) < 0.3, "the pause does not count"
    assert pausing.board.read() is None
    line.granted(2)
    assert pausing.has_gone_on() == [None]
    assert place.breaks == []
    assert line.running is place, "it holds the executor, so no other program of this worker goes first"
    assert 0.02 <= place.running_s(time.monotonic()) < 0.3
    running = pausing.board.read()
    assert running is not None
    assert 0.02 <= running.age_s < 0.3, "by which the gateway ends programs that run too long"
    place.end()
    thread.join(10)
    assert line.running is urgent
    urgent.end()
    (found,) = line.slowest_programs()
    assert (found.name, found.runs) == ("long", 1)
    assert 0.02e9 <= found.total_ns < 0.3e9
    counts = line.counts(Counts())
    assert counts.device_ns < 0.35e9
    assert sum(counts.waits) == 2, "a program waits once"


def test_a_program_that_is_cancelled_while_it_pauses_ends_without_a_turn() -> None:
    pausing = Pausing.begun()
    line, reason = pausing.line, LimitError("Not wanted any more.")
    other = line.open()
    other.received(Batch([RUN]))
    thread = threading.Thread(target=other.begin, daemon=True)
    thread.start()
    wait_for(lambda: line._waiting == 2)
    pausing.stop.append(reason)
    pausing.place.give_up()
    assert pausing.has_gone_on() == [reason]
    line.granted(2)
    time.sleep(0.02)
    assert thread.is_alive(), "it still holds the executor"
    line.recalled(2, 0.0)
    assert reason_to_stop(pausing.place.breaks) is reason, "it pauses no more"
    pausing.place.end()
    assert pausing.gateway.said == [(1, True), (2, True)]
    line.granted(3)
    thread.join(10)
    assert line.running is other
    other.end()
    pausing.stop.clear()
    pausing.place.begin()
    assert reason_to_stop(pausing.place.breaks) is None
    pausing.place.end()


def test_a_program_that_pauses_when_the_server_ends_goes_on() -> None:
    pausing = Pausing.begun()
    pausing.line.close()
    assert pausing.has_gone_on() == [None]
    pausing.place.end()
    assert pausing.gateway.said == [(1, True)]


def test_a_program_does_not_pause_for_a_turn_that_is_over() -> None:
    gateway = Gateway()
    line = RunQueue(gateway)
    line.granted(1)
    place = held(line)
    line.recalled(1, 0.0)
    place.end()
    assert gateway.said == [(1, False)]
    line.granted(2)
    place.received(Batch([RUN]))
    place.begin()
    assert reason_to_stop(place.breaks) is None
    assert gateway.said == [(1, False)]
    line.recalled(2, 5.0)
    assert place.breaks == [], "there is time left"
    place.end()
