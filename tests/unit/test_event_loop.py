"""The gateway's event loop, and how connections are accepted in one."""

from __future__ import annotations

import socket
import threading

import anyio
import pytest
from anyio.abc import SocketListener, SocketStream
from djinn_lib_server.accepting import accept_forever
from djinn_server.event_loop import EventLoop

TIMEOUT_S = 30.0


def test_tasks_are_cancelled_at_the_end_and_none_begins_after_it() -> None:
    loop, began, ended, late = EventLoop(), threading.Event(), threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def set_late() -> None:
        late.set()

    loop.spawn(set_late)
    loop.start()
    loop.spawn(wait)
    assert began.wait(TIMEOUT_S)
    loop.stop()
    assert ended.is_set()
    loop.spawn(set_late)
    loop.stop()
    assert not late.is_set()


def test_a_task_that_fails_is_logged_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    loop, done = EventLoop(), threading.Event()

    async def fail() -> None:
        raise ZeroDivisionError

    async def work() -> None:
        done.set()

    loop.start()
    loop.spawn(fail)
    loop.spawn(work)
    assert done.wait(TIMEOUT_S)
    loop.stop()
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_connections_beyond_the_limit_are_closed_and_a_failing_one_harms_no_other(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    async def serve(stream: SocketStream) -> None:
        if await stream.receive(1) == b"!":
            raise ZeroDivisionError
        await stream.send(b"served")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(accept_forever, await SocketListener.from_socket(listening), serve, 2)
        first, second = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
        async with await anyio.connect_tcp("127.0.0.1", port) as third:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await third.receive()
        async with first, second:
            await first.send(b"!")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await first.receive()
            await second.send(b".")
            assert await second.receive() == b"served"
        async with await anyio.connect_tcp("127.0.0.1", port) as fourth:
            await fourth.send(b".")
            assert await fourth.receive() == b"served"
        tasks.cancel_scope.cancel()
    assert "ZeroDivisionError" in caplog.text
