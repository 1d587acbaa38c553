"""Signals that end a program of a cluster, and what more of them do."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio

__all__ = ("ending_signals",)

_ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def ending_signals() -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive SIGTERM and SIGINT. Afterwards they are ignored: the process is ending.

    An engine sends a second signal to a program that takes long. If it arrived after the event loop, it would change
    the exit status, and what the program has yet to remove would stay.

    Concurrency:
        In the main thread, once in a process.
    """
    try:
        with anyio.open_signal_receiver(*_ENDING) as signals:
            yield signals
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
