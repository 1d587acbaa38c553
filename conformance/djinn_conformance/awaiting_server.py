"""A server that performs the handshakes of a transport in an event loop."""

from __future__ import annotations

import platform
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import torch
from anyio.abc import TaskGroup

from djinn.wire.messages import PROTOCOL_VERSION, Batch, Hello, Starting, Welcome
from djinn_conformance.assertions import expect
from djinn_conformance.capabilities import listen_options, listening_address
from djinn_conformance.harness import open_executor
from djinn_conformance.subjects import Subject
from djinn_plugins.common.kinds.transport import Channel, SupportsAsyncAccept, SupportsAsyncHandshake
from djinn_plugins.common.net.listening import listen
from djinn_plugins.executor.service import SessionService

__all__ = ("AwaitingServer",)

_PATIENCE_S = 8.0
_WAIT_S = 0.1


class AwaitingServer:
    """Serves a number of sessions, of which the one that connects first is greeted last.

    Args:
        subject: The transport.
        sessions: The number.
        cancel_first: Whether the first wait for a connection is cancelled, after a moment.

    Attributes:
        address: Where clients connect.
        cancelled_s: How long the cancelled wait continued.
    """

    def __init__(self, subject: Subject, sessions: int, *, cancel_first: bool = False) -> None:
        self._subject = subject
        self._sessions = self._left = sessions
        self._cancels = cancel_first
        self._listener: Any = listen(subject.registered.value, listening_address(subject), listen_options(subject))
        self._executor = open_executor()
        self._began = threading.Event()
        self._problems: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.address = str(self._listener.address)
        self.cancelled_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        self._began.wait(_PATIENCE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(_PATIENCE_S if kind is None else 0.0)
        is_over = not self._thread.is_alive()
        self._listener.close()
        self._executor.close()
        if kind is None:
            expect(is_over and not self._problems, "sessions whose handshakes were awaited",
                   got=self._problems or "no end", wanted="an end", where=str(self._subject))

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:  # noqa: BLE001  # `__exit__` reports it
            self._problems.append(error)

    async def _serve(self) -> None:
        if self._cancels:
            began = time.monotonic()
            with anyio.move_on_after(_WAIT_S):
                await self._listener.accept_async()
            self.cancelled_s = time.monotonic() - began - _WAIT_S
        self._began.set()
        others = anyio.Event()
        async with anyio.create_task_group() as tasks:
            await self._accept(tasks, others)

    async def _accept(self, tasks: TaskGroup, others: anyio.Event) -> None:
        listener: SupportsAsyncAccept = self._listener
        number = 0
        while (channel := await listener.accept_async()) is not None:
            tasks.start_soon(self._greet, channel, others, number, tasks.cancel_scope)
            number += 1

    async def _greet(self, channel: Channel, others: anyio.Event, number: int, until: anyio.CancelScope) -> None:
        assert isinstance(channel, SupportsAsyncHandshake)
        received = await channel.receive_async()
        assert received is not None
        sequence, hello, _ = received
        assert isinstance(hello, Hello)
        if number == 0 and self._sessions > 1:
            await channel.send_async(sequence, Starting(0.0))
            await others.wait()
        elif number == self._sessions - 1:
            others.set()
        await anyio.to_thread.run_sync(self._hold_session, channel, sequence)
        self._left -= 1
        if not self._left:
            until.cancel()

    def _hold_session(self, channel: Channel, sequence: int) -> None:
        channel.send(sequence, Welcome(PROTOCOL_VERSION, str(torch.__version__), platform.python_version(),
                                       sys.byteorder, self._executor.device, "awaited", received=sequence))
        channel.greeted()
        service = SessionService(self._executor, travels=True)
        while (received := channel.receive()) is not None:
            number, batch, tensors = received
            assert isinstance(batch, Batch)
            result, data = service.handle(batch, tensors)
            if batch.wants_reply:
                channel.send(number, result, data)
        service.close()
        channel.close()
