"""A connection that says when it is in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from djinn.kinds import Connection
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.wire.messages import Batch, Result
from djinn_plugins.watch.progress.screens import screen_here
from djinn_plugins.watch.progress.watcher import Watcher, watcher_of

__all__ = ("ProgressConnection", "watched")


def watched() -> Callable[[Connection], Connection] | None:
    """Return what wraps a connection; ``None`` without a terminal or a notebook."""
    screen = screen_here()
    if screen is None:
        return None
    watcher = watcher_of(screen)
    return lambda plain: ProgressConnection(plain, watcher)


class ProgressConnection(ConnectionWrapper):
    """Notes in attributes when it is in use, for a `djinn_plugins.watch.progress.watcher.Watcher` to read.

    Attributes:
        is_sending: Whether a batch is being sent.
        is_asking: Whether an answer is being awaited.
        calls: Number of the batch.
    """

    def __init__(self, plain: Connection, watcher: Watcher) -> None:
        super().__init__(plain)
        self.is_sending = False
        self.is_asking = False
        self.calls = 0
        self._watcher = watcher
        watcher.add(self)

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer."""
        self.calls += 1
        self.is_sending = True
        if self._watcher.is_asleep:
            self._watcher.wake()
        try:
            self.plain.submit(batch, tensors)
        except BaseException:
            if self._watcher.is_showing:
                self._watcher.clear()
            raise
        finally:
            self.is_sending = False

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer."""
        self.calls += 1
        self.is_asking = True
        if self._watcher.is_asleep:
            self._watcher.wake()
        try:
            return self.plain.request(batch, tensors)
        finally:
            self.is_asking = False
            if self._watcher.is_showing:
                # The program may print next, for example a traceback.
                self._watcher.clear()

    def close(self) -> None:
        """End the session."""
        self._watcher.remove(self)
        self.plain.close()
