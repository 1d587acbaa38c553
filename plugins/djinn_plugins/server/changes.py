"""Waiting in tasks until something that other tasks change has become true."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

__all__ = ("Changes",)


class Changes:
    """Wakes tasks that wait for a state.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Let all tasks that wait check again."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something is true, and return whether it is; ``False`` when the time is over."""
        with anyio.move_on_after(math.inf if timeout_s is None else timeout_s):
            while not is_true():
                self._event = self._event or anyio.Event()
                await self._event.wait()
        return is_true()
