"""The line of one worker, and a gateway that writes down what it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from djinn.wire.messages import Batch, Run
from djinn_plugins.server.run_queue import RunQueue
from djinn_plugins.server.session_slot import SessionSlot

RUN = Run(1, (), [], ())


class Gateway:
    """Writes down what is asked for and given back."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def ask(self) -> None:
        self.said.append("ask")

    def give_back(self, turn: int, *, wants_more: bool) -> None:
        self.said.append((turn, wants_more))


def wait_for(true: Callable[[], Any]) -> None:
    until = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


def held(line: RunQueue) -> SessionSlot:
    """Have a program run until `SessionSlot.end` is called."""
    first = line.open()
    first.received(Batch([RUN]))
    first.begin()
    return first
