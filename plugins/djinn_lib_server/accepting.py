"""Accepting connections in an event loop."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import SocketListener, SocketStream

__all__ = ("accept_forever",)

PAUSE_S = 0.1
_log = logging.getLogger("djinn.server")


async def accept_forever(
    listener: SocketListener, serve: Callable[[SocketStream], Awaitable[None]], most: int
) -> None:
    """Serve each connection in a task until cancelled, and log errors of those tasks.

    Args:
        listener: Closed at the end.
        serve: Serves a connection, which is closed afterwards.
        most: Maximum number of connections at a time; further ones are closed at once.
    """
    serving = 0

    async def attend(stream: SocketStream) -> None:
        nonlocal serving
        try:
            async with stream:
                await serve(stream)
        except (OSError, anyio.BrokenResourceError) as error:
            _log.info("a connection broke: %s", error)
        except Exception:  # noqa: BLE001  # logged in full; it must not end the other connections
            _log.exception("a connection could not be served")
        finally:
            serving -= 1

    async with listener, anyio.create_task_group() as tasks:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                # The system has no descriptors left, for example.
                _log.error("a connection could not be accepted: %s", error)  # no bug
                await anyio.sleep(PAUSE_S)
                continue
            if serving < most:
                serving += 1
                tasks.start_soon(attend, stream)
            else:
                await stream.aclose()
