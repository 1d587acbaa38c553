"""What a client waits for beside the answers of a connection, for a plugin that shows it: a server, or a whole file.

The code that waits reports what it waits for; without a listener, nothing happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ("WaitListener", "now_waiting", "use_listener", "waiting")


class WaitListener(Protocol):
    """Hears the reasons of a client's waits.

    Concurrency:
        Any thread.
    """

    def began(self, what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """A wait begins, or its reason changes, or of a transfer of many messages so much is done."""

    def ended(self) -> None:
        """The wait is over."""


_listener: WaitListener | None = None


def use_listener(listener: WaitListener | None) -> None:
    """Report all later waits to this listener; ``None`` for none."""
    global _listener
    _listener = listener


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Report a wait for as long as the block runs."""
    listener = _listener
    if listener is None:
        yield
        return
    listener.began(what)
    try:
        yield
    finally:
        listener.ended()


def now_waiting(what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
    """Report another reason of the current wait; or, with a total, how much of a transfer is done."""
    if _listener is not None:
        _listener.began(what, done_bytes, total_bytes)
