"""The line of one worker: sessions in turn, writing ahead of reading, and the turn that the worker has or has not."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.memory.room import DEFINE, open_executor
from support.servers.lines import RUN, Gateway, held, wait_for

from djinn.errors import LimitError, RefusedError, TransportError
from djinn.ir.phase import ExecutionPhase
from djinn.wire.messages import Batch, Free, Run, Upload
from djinn.wire.tensors import header_of
from djinn_plugins.common.kinds.memory import MemoryOptions
from djinn_plugins.common.net.retry import MAX_TRIES, patiently
from djinn_plugins.executor.memory.manager import TieredManager
from djinn_plugins.executor.service import SessionService
from djinn_plugins.server.kinds.metrics import Counts
from djinn_plugins.server.run_queue import RunQueue
from djinn_plugins.server.session_slot import BEGINNING_S, SessionSlot
from djinn_plugins.server.tenant_limits import Limits

DECODE = ExecutionPhase.LLM_DECODE
UNKNOWN = ExecutionPhase.UNKNOWN


class Session:
    """A thread that runs programs of a length, and writes its name down for each."""

    def __init__(self, line: RunQueue, name: str, said: list[str], seconds: float, runs: int,
                 phase: ExecutionPhase = ExecutionPhase.UNKNOWN) -> None:
        self.place = line.open()
        self._name, self._said, self._seconds, self._runs, self._phase = name, said, seconds, runs, phase
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        for _ in range(self._runs):
            self.place.received(Batch([RUN], phase=self._phase))
            self.place.begin()
            self._said.append(self._name)
            time.sleep(self._seconds)
            self.place.end()
            self.place.carried_out()


def order(line: RunQueue, sessions: Sequence[tuple[str, float, ExecutionPhase]], runs: int) -> list[str]:
    """Say whose programs run, in order, if each session always has another one; its time is counted, not waited for."""
    now, said = 0.0, list[str]()
    named: dict[SessionSlot, tuple[str, float]] = {}
    for name, seconds, phase in sessions:
        place = line.open()
        place.received(Batch([RUN] * runs, phase=phase))
        named[place] = name, seconds
        line.enter(place)
    while len(said) < runs:
        place = line.running
        assert place is not None
        name, seconds = named[place]
        said.append(name)
        place.asked_s = place.began_s = now
        now += seconds
        line.end(place, now)
        place._gate.acquire(blocking=False)
        line.enter(place)
    return said


def test_sessions_are_served_by_the_time_that_they_used() -> None:
    said = order(RunQueue(), 2 * [("long", 0.02, UNKNOWN), ("short", 0.005, UNKNOWN)], 100)
    assert 78 <= said.count("short") <= 82, "four short ones for each long one"


def ends(line: RunQueue, lengths: dict[SessionSlot, list[float]], repeated: int) -> dict[SessionSlot, float]:
    """Run programs of these lengths, and say when each session has run its last one; time is counted, not waited for.

    Args:
        line: The line.
        lengths: Of each session's programs.
        repeated: How many of these a client sends without asking for values.
    """
    now, ended = 0.0, dict[SessionSlot, float]()
    done = dict.fromkeys(lengths, 0)

    def enter(place: SessionSlot) -> None:
        place.received(Batch([RUN], fetch=(1,) if done[place] >= repeated else ()))
        line.enter(place)

    for place in lengths:
        enter(place)
    while (place := line.running) is not None:
        place.began_s = now
        now += lengths[place][done[place]]
        done[place] += 1
        line.end(place, now)
        has_more = done[place] < len(lengths[place])
        place.carried_out(has_more=has_more)
        place._gate.acquire(blocking=False)
        if has_more:
            enter(place)
        else:
            ended[place] = now
    return ended


def test_what_a_session_repeats_after_its_worker_has_died_pushes_it_behind_no_other() -> None:
    line = RunQueue()
    *others, slow = (line.open() for _ in range(50))
    ended = ends(line, {place: 100 * [0.01] for place in others} | {slow: [0.75, 0.01, 0.01, 0.01]}, repeated=3)
    assert ended[slow] < 5, "it waits for a few programs of each of the others, not until they have used as much time"


def test_a_session_that_asks_for_no_values_gets_no_more_in_the_long_run() -> None:
    line = RunQueue()
    *others, silent = (line.open() for _ in range(10))
    for place in others:
        place.beginning_s = 0.0
    ended = ends(line, {place: 2000 * [0.01] for place in (*others, silent)}, repeated=2000)
    assert ended[silent] > 200 - 11 * BEGINNING_S


def test_writing_goes_ahead_of_reading_but_for_a_tenth() -> None:
    line, said = RunQueue(), list[str]()
    first = held(line)
    Session(line, "read", said, 0.005, 1)
    Session(line, "read", said, 0.005, 1)
    writing = Session(line, "write", said, 0.005, 1, DECODE)
    wait_for(lambda: line._waiting == 3)
    first.end()
    writing.thread.join(10)
    assert said[0] == "write"
    said = order(RunQueue(), [("write", 0.002, DECODE), ("write", 0.002, DECODE), ("read", 0.002, UNKNOWN)], 100)
    assert 9 <= said.count("read") <= 11, "one that reads gets a turn where many write, but not many"


def test_what_a_session_does_it_does_until_it_says_otherwise() -> None:
    place, writes = RunQueue().open(), list[bool]()
    for batch in (Batch([RUN]), Batch([Free((1,))], phase=DECODE), Batch([RUN]), Batch([RUN], phase=UNKNOWN),
                  Batch([RUN])):
        place.received(batch)
        writes.append(place.is_decoding)
        place.carried_out()
    assert writes == [False, True, True, False, False]


def test_a_worker_asks_once_keeps_its_turn_and_gives_it_back_when_it_is_wanted() -> None:
    gateway = Gateway()
    line = RunQueue(gateway)
    place = line.open()
    place.received(Batch([RUN]))
    thread = threading.Thread(target=place.begin)
    thread.start()
    wait_for(lambda: gateway.said)
    time.sleep(0.02)
    assert thread.is_alive()
    line.granted(7)
    thread.join(10)
    place.end()
    place.carried_out()
    for _ in range(3):
        place.received(Batch([RUN]))
        place.begin()
        place.end()
        place.carried_out()
    assert gateway.said == ["ask"]
    assert not place.is_wanted
    line.recalled(6, 0.0)
    assert gateway.said == ["ask"], "that was another turn"
    line.recalled(7, 5.0)
    assert gateway.said == ["ask", (7, False)], "nothing is to be run"
    assert place.is_wanted


def test_sessions_that_share_memory_wait_for_their_turns_at_the_same_time() -> None:
    """If one of them kept the others away, the worker would give each turn back as if no other program waited."""
    gateway = Gateway()
    line = RunQueue(gateway)
    executor = open_executor()
    manager = TieredManager(executor, MemoryOptions(10**6))
    batch = Batch([*DEFINE, Upload(1, header_of(torch.ones(2))), Run(1, (1, 1), [], (2,))], fetch=(2,))
    answers: list[Any] = []

    def work() -> None:
        place = line.open()
        service = SessionService(executor, manager=manager, turns=place)
        place.received(batch)
        answers.append(service.handle(batch, [torch.ones(2)]))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: line._waiting == 2)
    line.granted(7)
    line.recalled(7, 0.0)
    wait_for(lambda: (7, True) in gateway.said)
    line.granted(8)
    for thread in threads:
        thread.join(10)
    assert [data[0].tolist() for _, data in answers] == [[2.0, 2.0]] * 2
    assert gateway.said == ["ask", (7, True)]


def test_a_recalled_turn_is_given_back_after_its_time_and_not_before() -> None:
    settled: list[bool] = []
    gateway = Gateway()
    line = RunQueue(gateway, settle=lambda: settled.append(True))
    line.granted(1)
    place = line.open()
    place.received(Batch([RUN, RUN, RUN, RUN]))
    place.begin()
    line.recalled(1, 0.05)
    place.end()
    assert gateway.said == []
    place.begin()
    time.sleep(0.06)
    place.end()
    assert gateway.said == [(1, True)]
    assert settled
    line.granted(2)
    place.begin()
    line.recalled(2, 0.0)
    assert len(gateway.said) == 1, "a program runs"
    place.end()
    assert gateway.said[1:] == [(2, True)]
    line.granted(3)
    line.recalled(3, 0.05)
    assert len(gateway.said) == 2, "the message goes on"
    line.recalled(3, 0.0)
    assert gateway.said[2:] == [(3, False)]
    place.carried_out()


def test_a_message_that_is_through_gives_a_wanted_turn_back_unless_the_next_one_is_there() -> None:
    gateway = Gateway()
    line = RunQueue(gateway)
    line.granted(1)
    place = line.open()
    place.received(Batch([RUN]))
    line.recalled(1, 5.0)
    place.carried_out(has_more=True)
    assert gateway.said == []
    place.received(Batch([RUN]))
    place.begin()
    place.end()
    place.carried_out()
    assert gateway.said == [(1, False)]
    line.granted(2)
    place.received(Batch([Free((1,))]))
    line.recalled(2, 5.0)
    assert gateway.said[1:] == [(2, False)], "what runs nothing needs no turn"


def test_whoever_waits_when_the_server_ends_is_told() -> None:
    line = RunQueue()
    first, errors = held(line), list[str]()

    def wait() -> None:
        place = line.open()
        place.received(Batch([RUN]))
        with pytest.raises(TransportError) as caught:
            place.begin()
        errors.append(str(caught.value))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: line._waiting == 3)
    line.close()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3
    first.end()
    with pytest.raises(TransportError, match="ending"):
        line.open().begin()


def test_of_a_flood_the_last_programs_are_refused_and_of_an_ordinary_message_none() -> None:
    rejected: list[str] = []
    line = RunQueue(limits=lambda: Limits(queued=3), reject=rejected.append)
    others = [line.open() for _ in range(3)]
    for other in others:
        other.received(Batch([RUN]))
    with pytest.raises(LimitError, match="3 programs wait already; the limit is 3") as caught:
        line.check()
    assert caught.value.retry_after_s > 0
    last = line.open()
    last.received(Batch([RUN, RUN]))
    last.begin()
    last.end()
    with pytest.raises(LimitError, match="the limit is 3"):
        last.begin()
    last.carried_out()
    assert rejected == ["queued", "queued"]
    assert line.queued == 3
    for other in others:
        other.carried_out()
    assert (line.queued, line.busy) == (0, 0)
    line.check()


def test_what_a_program_would_wait_is_one_of_each_session_at_the_pace_of_late() -> None:
    line = RunQueue(limits=lambda: Limits(wait_s=0.05))
    place, *others = [line.open() for _ in range(5)]
    for _ in range(4):
        place.received(Batch([RUN]))
        place.begin()
        time.sleep(0.02)
        place.end()
        place.carried_out()
    line.check()
    place.received(Batch([RUN] * 50))
    line.check()  # its other programs would not be first
    for other in others:
        other.received(Batch([RUN] * 50))
    with pytest.raises(LimitError, match="would wait for some 0.1") as caught:
        line.check()
    assert 0.04 < caught.value.retry_after_s < 0.2
    for each in (place, *others):
        each.carried_out()
    line.check()
    counts = line.counts(Counts({"ok": 3}))
    assert counts.requests == {"ok": 3}
    assert sum(counts.waits) == 4
    assert 0.08e9 <= counts.device_ns < 0.3e9


def test_a_program_that_runs_for_long_is_waited_for_also_if_it_is_the_first_one() -> None:
    line = RunQueue(limits=lambda: Limits(wait_s=0.05))
    place = line.open()
    place.received(Batch([RUN]))
    place.begin()
    line.check()
    time.sleep(0.06)
    with pytest.raises(LimitError, match=r"would wait for some 0\.\d+ s"):
        line.check()
    place.end()
    place.carried_out()
    line.check()


def test_whoever_is_refused_comes_again_as_late_as_asked_a_few_times() -> None:
    now, tries = [0.0], list[float]()

    def refuse(left_s: float) -> str:
        tries.append(now[0])
        assert left_s == pytest.approx(max(0.001, 100 - now[0]))
        raise RefusedError("No room.", retry_after_s=1.0)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(RefusedError, match=r"No room\. It was asked 8 times .*connect_timeout_s") as caught:
        patiently(refuse, 100, sleep=sleep, clock=lambda: now[0])
    assert caught.value.retry_after_s == 1.0
    assert len(tries) == MAX_TRIES
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    for index, pause in enumerate(pauses):
        assert 1.5 ** index <= pause <= 1.5 ** (index + 1)
    assert len({round(pause / 1.5 ** index, 6) for index, pause in enumerate(pauses)}) > 1, "not all together"


def test_nobody_waits_for_what_is_later_than_the_time_there_is_nor_for_what_waiting_does_not_help() -> None:
    tries: list[float] = []

    def refuse(left_s: float) -> str:
        tries.append(left_s)
        raise RefusedError("No room.", retry_after_s=20.0)

    with pytest.raises(RefusedError, match="It was asked 1 times"):
        patiently(refuse, 10)

    def deny(left_s: float) -> str:
        tries.append(left_s)
        raise RefusedError("The token is wrong.")

    with pytest.raises(RefusedError, match=r"^\[DJ305\] The token is wrong\.$"):
        patiently(deny, 10)
    assert len(tries) == 2
