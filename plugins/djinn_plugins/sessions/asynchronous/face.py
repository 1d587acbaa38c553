"""The functions of `djinn` that can be awaited, and the context of a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread

import djinn
from djinn.session import runtime
from djinn.session.session import Session
from djinn_plugins.sessions.asynchronous.calls import run

__all__ = ("init_async", "materialize_async", "run_async", "session")

P = ParamSpec("P")
T = TypeVar("T")


async def init_async(server: str | None = None, **settings: Any) -> Session:
    """Start a session as `djinn.init` does, without blocking the event loop. If cancelled, no session runs.

    Args:
        server: As for `djinn.init`.
        **settings: As for `djinn.init`.

    Raises:
        DjinnError: As for `djinn.init`.
    """
    return await run(partial(runtime.init, server, **settings), _end)


async def materialize_async(*values: Any) -> Any:
    """Fetch tensors in one round trip as `djinn.materialize` does, without blocking the event loop.

    Cancelling it ends the wait, and the session can be used further. Submitted operations that have not run are
    cancelled, too, unless other tasks wait for the session; their values then raise an `OperationCancelledError`.

    Args:
        *values: As for `djinn.materialize`.

    Raises:
        TransportError: The connection is lost.
        Exception: The exception of the operation that should have computed a value.
    """
    return await run(partial(djinn.materialize, *values))


async def run_async(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread, so that whatever it waits for does not block the event loop.

    The function may upload, record, and read values. Modes such as ``torch.no_grad()`` belong to a thread in PyTorch,
    so the function enters those that it needs. It is cancelled as `materialize_async` is, where it waits for the
    session.

    Args:
        function: The function.
        *args: Its arguments.
        **kwargs: Its named arguments.
    """
    return await run(partial(function, *args, **kwargs))


class session:  # noqa: N801  # used like a function
    """A context in which a session runs: ``with``, or ``async with``, which does not block the event loop.

    Args:
        server: As for `djinn.init`.
        **settings: As for `djinn.init`.
    """

    def __init__(self, server: str | None = None, **settings: Any) -> None:
        self._begin = partial(runtime.init, server, **settings)
        self._begin_async = partial(init_async, server, **settings)
        self._session: Session | None = None

    def __enter__(self) -> Session:
        self._session = self._begin()
        return self._session

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        _end(self._session)

    async def __aenter__(self) -> Session:
        self._session = await self._begin_async()
        return self._session

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        with anyio.CancelScope(shield=True):
            # In addition to the threads of calls, which this has to wait for.
            await anyio.to_thread.run_sync(_end, self._session, limiter=anyio.CapacityLimiter(1))


def _end(started: Session | None) -> None:
    """End a session, unless it has ended, for example because another was started."""
    if started is not None and not started.closed:
        runtime.shutdown()
