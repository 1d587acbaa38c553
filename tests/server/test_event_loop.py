"""The gateway's event loop: its tasks, its channels to workers, and how connections are accepted in one."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import SocketListener, SocketStream

from djinn_plugins.common.net.accepting import Visit, accept_forever
from djinn_plugins.server import control_channel
from djinn_plugins.server.changes import Changes
from djinn_plugins.server.control import Drained, FromStore, Incoming, Look, Seen, SessionState, Spawned, StoreReply
from djinn_plugins.server.control_channel import FROM_WORKER, MAX_UNANSWERED, TURN_REQUESTS, AwaitedControl, Control
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.pacing import SHARE, Pacing
from djinn_plugins.server.pending_replies import MAX_QUESTIONS, PendingReplies

TIMEOUT_S = 30.0


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def framed(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_task_that_fails_is_logged_and_the_others_go_on(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    tasks, done = Tasks(), anyio.Event()

    async def fail() -> None:
        raise ZeroDivisionError

    async def work() -> None:
        await anyio.sleep(0.01)
        done.set()

    with pytest.raises(RuntimeError, match="does not run"):
        tasks.spawn(work)
    async with anyio.create_task_group() as group:
        tasks.enter(group)
        tasks.spawn(fail)
        tasks.spawn(work)
        with anyio.fail_after(TIMEOUT_S):
            await done.wait()
        tasks.spawn(anyio.sleep_forever)
        group.cancel_scope.cancel()
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_who_waits_for_a_change_is_woken_by_it_and_by_no_other(anyio_backend: str) -> None:
    changes, state, found = Changes(), {"count": 0}, list[tuple[int, bool]]()

    async def wait(least: int, timeout_s: float | None) -> None:
        found.append((least, await changes.wait_for(lambda: state["count"] >= least, timeout_s)))

    with anyio.fail_after(TIMEOUT_S):
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(wait, 2, None)
            waiting.start_soon(wait, 1, None)
            waiting.start_soon(wait, 3, 0.05)
            for _ in range(2):
                await anyio.wait_all_tasks_blocked()
                state["count"] += 1
                changes.notify()
    assert found == [(1, True), (2, True), (3, False)]
    assert await changes.wait_for(lambda: True, 0.0)


def pair() -> tuple[AwaitedControl, Control, socket.socket]:
    """Both ends of a channel: one for tasks, one for threads."""
    ours, theirs = socket.socketpair()
    return AwaitedControl(ours, takes_descriptors=True), Control(theirs), theirs


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_messages_and_descriptors_go_from_threads_to_tasks_and_back(anyio_backend: str) -> None:
    awaited, control, _ = pair()
    with anyio.fail_after(TIMEOUT_S):
        await awaited.send(Look(1))
        assert control.receive() == (Look(1), None)
        control.send(Spawned(1, 42), 0)
        control.send(Drained())
        received = await awaited.receive()
        assert received is not None
        message, descriptor = received
        assert message == Spawned(1, 42)
        assert descriptor is not None
        assert os.fstat(descriptor).st_ino == os.fstat(0).st_ino
        os.close(descriptor)
        assert await awaited.receive() == (Drained(), None)
        control.close()
        assert await awaited.receive() is None
        with pytest.raises(OSError, match="Broken pipe"):
            await awaited.send(Look(2))
    awaited.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("said", [
    b"\xff" * 8, b"\x03\0\0\0???", b"\x04\0", framed(b"\x81\xa4type\xa2\xff\xfe"),
    framed(msgspec.msgpack.encode(Look(1))),
    framed(msgspec.msgpack.encode(Seen(1, (SessionState("x", b"", "", math.nan, 0.0, 0, 0.0, 0, 0),)))),
    framed(b"\x82\xa4type\xa7drained\xa1x" + b"\x91" * 5000 + b"\xc0"),
], ids=["too-long", "nonsense", "cut-short", "no-text", "of-the-gateway", "no-number", "nested"])
async def test_what_is_no_message_ends_the_channel(anyio_backend: str, said: bytes) -> None:
    ours, theirs = socket.socketpair()
    turns, worker = socket.socketpair()
    awaited, control = AwaitedControl(ours, messages=FROM_WORKER), Control(turns, messages=TURN_REQUESTS)
    for end in (theirs, worker):
        end.sendall(said)
        end.shutdown(socket.SHUT_WR)
    with anyio.fail_after(TIMEOUT_S):
        assert await awaited.receive() is None
    assert control.receive() is None
    for each in (awaited, control, theirs, worker):
        each.close()


@pytest.mark.anyio
async def test_a_worker_that_leaves_answers_unread_is_asked_no_more_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_channel, "ANSWER_TIMEOUT_S", 0.5)
    ours, theirs = socket.socketpair()
    awaited, tasks, made = AwaitedControl(ours, messages=FROM_WORKER), Tasks(), 0
    theirs.sendall(b"".join(framed(msgspec.msgpack.encode(FromStore(number))) for number in range(200)))

    async def answer() -> tuple[StoreReply, None]:
        nonlocal made
        made += 1
        return StoreReply(1, problem="x" * 2**20), None

    async with anyio.create_task_group() as group:
        tasks.enter(group)
        with anyio.fail_after(TIMEOUT_S):
            read = 0
            while await awaited.receive() is not None:
                read += 1
                awaited.question(tasks, answer, in_turn=read % 2 == 0)
    assert MAX_UNANSWERED <= read < 2 * MAX_UNANSWERED
    assert made <= MAX_UNANSWERED // 2 + 2, "answers in turn are made when the last one was read"
    assert "has not read an answer" in caplog.text
    awaited.close()
    theirs.close()


@pytest.mark.anyio
async def test_descriptors_that_come_with_a_message_are_not_kept() -> None:
    ours, theirs = socket.socketpair()
    awaited = AwaitedControl(ours, messages=FROM_WORKER)
    before = open_files()
    for byte in framed(msgspec.msgpack.encode(Drained())):
        socket.send_fds(theirs, [bytes([byte])], [0])
    assert await awaited.receive() == (Drained(), None)
    assert open_files() == before
    awaited.close()
    theirs.close()


def test_a_process_takes_a_part_of_a_threads_time() -> None:
    now_s, spent_s = 100.0, 0.0
    pacing = Pacing(lambda: now_s)
    while now_s < 200:
        pacing.add(0.004)
        spent_s += 0.004
        now_s += 0.004 + pacing.pause_s()
    assert spent_s == pytest.approx(100 * SHARE, rel=0.05)


def test_a_worker_waits_on_its_side_before_it_asks_more() -> None:
    asked, release = list[int](), threading.Event()

    def send(request: FromStore) -> None:
        asked.append(request.number)
        release.wait(TIMEOUT_S)
        replies.answered(StoreReply(request.number), None)

    replies = PendingReplies[FromStore, StoreReply](send, TIMEOUT_S)
    threads = [threading.Thread(target=replies.ask, args=(FromStore,)) for _ in range(MAX_QUESTIONS + 5)]
    for thread in threads:
        thread.start()
    while len(asked) < MAX_QUESTIONS:
        time.sleep(0.01)
    assert len(asked) == MAX_QUESTIONS
    release.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(asked) == MAX_QUESTIONS + 5


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_worker_that_reads_nothing_is_given_up_and_holds_up_nobody(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "SEND_TIMEOUT_S", 0.2)
    awaited, control, theirs = pair()
    other, reader, _ = pair()
    large = Incoming("tcp://there", bytes(2**19))
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await anyio.sleep(0.01)
            await other.send(Look(beats))
            beats += 1

    async def flood() -> None:
        while True:
            await awaited.send(large)

    with anyio.fail_after(TIMEOUT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            with pytest.raises(TimeoutError):
                await flood()
            tasks.cancel_scope.cancel()
    assert beats > 3
    assert reader.receive() == (Look(0), None)
    # A message that was sent in part ends the channel: what follows would be taken for the rest of it.
    while control.receive() is not None:
        pass
    assert theirs.recv(1) == b""
    for end in (awaited, theirs, other, reader):
        end.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_beyond_the_limit_the_oldest_idle_connection_is_closed_and_a_failing_one_harms_no_other(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    async def serve(stream: SocketStream, visit: Visit) -> None:
        if await stream.receive(1) == b"!":
            raise ZeroDivisionError
        with visit.busy():
            await stream.receive(1)
            await stream.send(b"served")

    async def is_closed(stream: SocketStream) -> bool:
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await stream.receive()
        return True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(accept_forever, await SocketListener.from_socket(listening), serve, 2)
        busy, idle = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
        async with busy, idle:
            await busy.send(b".")
            await anyio.sleep(0.05)
            async with await anyio.connect_tcp("127.0.0.1", port) as third:
                assert await is_closed(idle)
                await third.send(b".")
                await anyio.sleep(0.05)
                async with await anyio.connect_tcp("127.0.0.1", port) as fourth:
                    assert await is_closed(fourth), "all are busy"
                for each in (busy, third):
                    await each.send(b".")
                    assert await each.receive() == b"served"
        async with await anyio.connect_tcp("127.0.0.1", port) as failing:
            await failing.send(b"!")
            assert await is_closed(failing)
        async with await anyio.connect_tcp("127.0.0.1", port) as last:
            await last.send(b"..")
            assert await last.receive() == b"served"
        tasks.cancel_scope.cancel()
    assert "ZeroDivisionError" in caplog.text
