"""Cancelling what another thread waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TypeVar

from djinn_plugins.common.interrupts import Deferral, deferrals

__all__ = ("Cancellation",)

T = TypeVar("T")


class Cancellation(Deferral):
    """Does for a thread what an interrupt does for the main thread, when another thread calls `cancel`.

    Args:
        reason: The exception that ends what the thread waits for. A `DjinnError` would count as a broken connection.

    Concurrency:
        `thread` is a context of the thread; any thread may call `cancel`.
    """

    def __init__(self, reason: BaseException) -> None:
        super().__init__({})
        self._reason = reason
        self._waking = threading.Lock()

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Let this cancel what the thread waits for."""
        deferrals[get_ident()] = self
        try:
            yield
        finally:
            del deferrals[get_ident()]

    def cancel(self) -> None:
        """End the current wait of the thread, or its next one. Never waits."""
        with self._waking:
            self.error = self._reason
            if self._wake is not None:
                self._wake()

    def through(self, action: Callable[[], T]) -> T:
        """Run an action that cannot be ended from another thread, unless the thread is cancelled already."""
        if self.error is not None:
            raise self.error
        return action()

    def _wake_with(self, wake: Callable[[], object] | None) -> None:
        # The lock keeps `cancel` from waking a thread that waits for something else by then.
        with self._waking:
            self._wake = wake
