"""Servers that die: connections that break where a test chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from djinn.errors import TransportError
from djinn.kinds.backend_wrapper import unwrapped
from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.session.connecting import connect
from djinn.session.session import Session
from djinn.wire.messages import Batch, Define, Result, Run, RunDelta

__all__ = ("DyingConnection", "VirtualTime", "handing_over_each", "let_die", "recovering")


class DyingConnection(ConnectionWrapper):
    """A connection that breaks permanently after a number of messages.

    Args:
        plain: The wrapped connection.
        messages: How many messages still go through.
        delivers: Whether the last one is executed before the connection breaks, so that only the answer is lost.
    """

    def __init__(self, plain: Any, messages: int, *, delivers: bool) -> None:
        super().__init__(plain)
        self._left = messages
        self._delivers = delivers

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch, or break."""
        if self._may_pass():
            self.plain.submit(batch, tensors)
            return
        if self._delivers:
            self.plain.submit(batch, tensors)
        self._break()

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer, or break."""
        if self._may_pass():
            answer: tuple[Result, list[torch.Tensor]] = self.plain.request(batch, tensors)
            return answer
        if self._delivers:
            self.plain.request(batch, tensors)
        self._break()
        raise AssertionError

    def _may_pass(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def _break(self) -> None:
        raise TransportError(f"The connection to {self.plain.address} was cut.")


def let_die(session: Session, messages: int = 0, *, delivers: bool = False) -> None:
    """Make the session's server die after this many more messages, with all values that it holds."""
    with session.lock:
        for executor in session.backend.executors:
            executor.wrap_connection(lambda plain: DyingConnection(plain, messages, delivers=delivers))


@contextmanager
def recovering(session: Session) -> Iterator[Any]:
    """Let a running session recover from deaths for a while, on new connections.

    Tensors made in the block must be dropped before it ends. Gives the backend, whose checkpoints and
    journal are the plugin's own.
    """
    with session.lock:
        session.flush()
        before = session.backend
        connections = [connect(session.plugins, address)
                       for address in session.config.addresses]
        opens = session.backend_opener(session.plugins.settings.changed(recovery="replay"))
        layer: Any = opens(connections, session.tape, session.released)
        session.backend = layer
    try:
        yield unwrapped(layer)
    finally:
        with session.lock:
            session.backend = before
            layer.close()


class VirtualTime:
    """A clock that advances while executors work: each operation takes the same time.

    Args:
        node_s: That time.
    """

    def __init__(self, node_s: float) -> None:
        self.now_s = 0.0
        self._node_s = node_s

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def rule(self, layer: Any, budget_s: float) -> None:
        """Let a layer that recovers, which has done nothing yet, live by this clock."""
        layer._checkpointer = type(layer._checkpointer)(layer.journal, budget_s, layer._devices, self)
        make = layer._make

        def ruled(meters: Sequence[Any]) -> Any:
            for meter in meters:
                meter.plain = _ByTheClock(meter.plain, self)
            return make(meters)

        for meter in layer._meters:
            meter.plain = _ByTheClock(meter.plain, self)
        layer._make = ruled

    def work(self, operations: int) -> float:
        """Account for a number of operations, and return how many seconds they take."""
        self.now_s += operations * self._node_s
        return operations * self._node_s


class _ByTheClock(ConnectionWrapper):
    """A connection whose server reports run times by a clock that counts operations."""

    def __init__(self, plain: Any, clock: VirtualTime) -> None:
        super().__init__(plain)
        self._clock = clock
        self._lengths: dict[int, int] = {}
        self._ran_s = 0.0

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch, and advance the clock."""
        self._look(batch)
        self.plain.submit(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch, advance the clock, and wait for the answer."""
        self._look(batch)
        result, data = self.plain.request(batch, tensors)
        ran_s, self._ran_s = self._ran_s, 0.0
        return msgspec.structs.replace(result, run_ns=round(ran_s * 1e9)), data

    def _look(self, batch: Batch) -> None:
        for command in batch.commands:
            if isinstance(command, Define):
                self._lengths[command.program] = len(command.body.steps)
            elif isinstance(command, (Run, RunDelta)):
                self._ran_s += self._clock.work(self._lengths[command.program])


@contextmanager
def handing_over_each(session: Session) -> Iterator[None]:
    """Submit every operation as soon as it is recorded."""
    session.flush_after(1)
    try:
        yield
    finally:
        session.flush_after(session.config.flush_every)
