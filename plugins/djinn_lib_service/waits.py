"""What a client waits for before it has a connection, for a plugin that shows it.

A transport says what it waits for; without a listener, nothing happens.
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

    def began(self, what: str) -> None:
        """A wait begins, or its reason changes."""

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


def now_waiting(what: str) -> None:
    """Report another reason of the current wait."""
    if _listener is not None:
        _listener.began(what)
