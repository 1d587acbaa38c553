"""The gateway's event loop: where everything runs that waits and moves no tensors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

from anyio.abc import TaskGroup

__all__ = ("Tasks",)

_log = logging.getLogger("djinn.server")
ArgsT = TypeVarTuple("ArgsT")


class Tasks:
    """The tasks of a server, which fail one by one.

    Concurrency:
        Tasks of one event loop, once `enter` was called.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None

    def enter(self, group: TaskGroup) -> None:
        """Use a group, whose end ends the tasks."""
        self._group = group

    def spawn(self, function: Callable[[*ArgsT], Awaitable[object]], *args: *ArgsT) -> None:
        """Start a task. If it fails, the error is logged.

        Raises:
            RuntimeError: No group was entered.
        """
        if self._group is None:
            raise RuntimeError("the event loop does not run")
        self._group.start_soon(_logged, function, args)


async def _logged(function: Callable[[*ArgsT], Awaitable[object]], args: tuple[*ArgsT]) -> None:
    try:
        await function(*args)
    except Exception:  # noqa: BLE001  # logged in full; it must not end the other tasks
        _log.exception("a task of the gateway failed")
