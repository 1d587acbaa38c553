"""Accepting connections in an event loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

import anyio
from anyio.abc import SocketListener, SocketStream

from djinn_plugins.common.net.stranger_log import StrangerLog

__all__ = ("Visit", "accept_forever")

PAUSE_S = 0.1
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)


class Visit:
    """A connection that is served."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.is_busy = False

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the connection, though there are too many: its request is known, and is being answered."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False


async def accept_forever(
    listener: SocketListener, serve: Callable[[SocketStream, Visit], Awaitable[None]], most: int
) -> None:
    """Serve each connection in a task until cancelled, and log errors of those tasks.

    Args:
        listener: Closed at the end.
        serve: Serves a connection, which is closed afterwards, and says when it is busy.
        most: Maximum number of connections at a time. A further one closes the oldest one that is not busy.
    """
    visits: dict[Visit, None] = {}

    async def attend(stream: SocketStream, visit: Visit) -> None:
        try:
            with visit.scope:
                async with stream:
                    await serve(stream, visit)
        except (OSError, anyio.BrokenResourceError) as error:
            _strangers.write(logging.INFO, "connections that broke", "a connection broke: %s", error)
        except Exception:  # noqa: BLE001  # logged in full; it must not end the other connections
            _log.exception("a connection could not be served")
        finally:
            visits.pop(visit, None)

    async with listener, anyio.create_task_group() as tasks:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                # The system has no descriptors left, for example.
                _strangers.write(logging.ERROR, "connections that could not be accepted", "a connection could not be "
                                 "accepted: %s", error)
                await anyio.sleep(PAUSE_S)
                continue
            if len(visits) >= most:
                oldest = next((visit for visit in visits if not visit.is_busy), None)
                if oldest is None:
                    await stream.aclose()
                    continue
                del visits[oldest]
                oldest.scope.cancel()
            visits[(visit := Visit())] = None
            tasks.start_soon(attend, stream, visit)
