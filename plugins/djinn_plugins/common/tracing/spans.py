"""Spans: where the time of operations goes. They cost nothing unless they are collected."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import msgspec

from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.kinds.transport import Connection
from djinn.wire.messages import Batch, Define, Result, Run, RunDelta, Timing, Upload

if TYPE_CHECKING:
    import torch

    from djinn.kinds import RemoteExecutor
    from djinn.session.session import Session

Wrapped = TypeVar("Wrapped", bound=Connection)
MAX_SPANS = 200_000
"""Most spans that are kept; further ones are only counted."""


class SpanStage(StrEnum):
    """Stages on which time is spent."""

    CAPTURE = "capture"
    """The program runs and its operations are recorded."""
    WIRE = "wire"
    """A batch is passed to the connection, or its answer is awaited."""
    EXECUTION = "execution"
    """The executor is working."""


@attrs.frozen
class Span:
    """A period of time."""

    name: str
    stage: SpanStage
    begin_ns: int
    """On the clock of `time.perf_counter_ns`."""
    end_ns: int
    thread: str
    """Name of its thread."""
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    """Counts; of what an executor did, and of what led there, the ``executor`` and the number of the ``run``."""


class Spans:
    """The spans of one session, while they are collected.

    Attributes:
        dropped: How many did not fit.

    Concurrency:
        Any thread may add.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.dropped = 0

    def __iter__(self) -> Iterator[Span]:
        return iter(sorted(self._spans, key=lambda span: (span.begin_ns, -span.end_ns)))

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, name: str, stage: SpanStage, begin_ns: int, **facts: Any) -> None:
        """Add a span that ends now, on this thread."""
        self.put(Span(name, stage, begin_ns, perf_counter_ns(), threading.current_thread().name, facts))

    def put(self, span: Span) -> None:
        """Add a span."""
        if len(self._spans) >= MAX_SPANS:
            self.dropped += 1
        else:
            self._spans.append(span)


_is_collecting = False


@contextlib.contextmanager
def spans_of(session: Session) -> Iterator[Spans]:
    """Collect a session's spans for the length of a block. One block at a time.

    Raises:
        RuntimeError: Another block is already collecting.
        Exception: That of an operation which has failed before.
    """
    global _is_collecting
    if _is_collecting:
        raise RuntimeError("Spans are being collected already.")
    spans, _is_collecting = Spans(), True
    try:
        # The executor tells of everything since its last answer.
        session.synchronize()
        with connections_through(session, lambda remote, plain: _TimedConnection(plain, spans, remote)):
            yield spans
    finally:
        _is_collecting = False


@contextlib.contextmanager
def connections_through(
    session: Session, wrap: Callable[[RemoteExecutor, Connection], Wrapped]
) -> Iterator[list[Wrapped]]:
    """Let everything that goes to a session's executors pass through something, for the length of a block.

    Args:
        session: Whose.
        wrap: Makes what replaces an executor's connection; called once for each executor, in their order.
    """
    wrapped: list[Wrapped] = []

    def through(remote: RemoteExecutor, plain: Connection) -> Wrapped:
        wrapped.append(wrap(remote, plain))
        return wrapped[-1]

    with session.lock:
        undo = [remote.wrap_connection(partial(through, remote)) for remote in session.backend.executors]
    try:
        yield wrapped
    finally:
        with session.lock:
            for each in undo:
                each()


class ServerClock:
    """Converts times of a server's clock, by comparing it with this process's clock at each answer."""

    def __init__(self) -> None:
        self._offset_ns = 0
        self._round_trip_ns = sys.maxsize
        """Of the request that tells the offset: the shortest, since it is as wrong as half of that."""

    def compare(self, begin_ns: int, end_ns: int, now_ns: int) -> None:
        """Take in that the server's clock showed a time between two moments."""
        if end_ns - begin_ns < self._round_trip_ns:
            self._round_trip_ns = end_ns - begin_ns
            # The answer was written about half a round trip ago. An executor on this machine has the same clock.
            is_same_clock = begin_ns <= now_ns <= end_ns
            self._offset_ns = 0 if is_same_clock else (begin_ns + end_ns) // 2 - now_ns

    def here(self, server_ns: int) -> int:
        """Convert a time."""
        return server_ns + self._offset_ns


class _TimedConnection(ConnectionWrapper):
    """A connection that measures how long its requests take, and that asks when its executor ran programs."""

    def __init__(self, plain: Connection, spans: Spans, remote: RemoteExecutor) -> None:
        super().__init__(plain)
        self._spans = spans
        self._remote = remote
        self._free_ns = perf_counter_ns()
        self._sent = remote.nodes_sent
        self._clock = ServerClock()
        self._is_asked = False
        self._runs_sent = self._runs_told = 0

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Submit a batch."""
        facts = self._recorded(batch, tensors)
        with self._timed("hand over", facts):
            self.plain.submit(self._asking(batch), tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Submit a batch and wait for its answer."""
        facts = self._recorded(batch, tensors)
        asking, begin_ns = self._asking(batch), perf_counter_ns()
        with self._timed("ask and wait", facts):
            answer = self.plain.request(asking, tensors)
        if answer[0].now_ns:
            self._clock.compare(begin_ns, perf_counter_ns(), answer[0].now_ns)
        for timing in answer[0].timings:
            self._told(timing)
        return answer

    def _asking(self, batch: Batch) -> Batch:
        """Ask when commands are executed, from the first batch on: it is asked once."""
        is_asked, self._is_asked = self._is_asked, True
        return batch if is_asked else msgspec.structs.replace(batch, timed=True)

    def _told(self, timing: Timing) -> None:
        """Add the span of a command that was executed. Runs are reported in the order in which they were sent."""
        facts: dict[str, Any] = {"executor": self._remote.address}
        if timing.kind == "run":
            facts |= {"run": self._runs_told, "program": timing.number}
            self._runs_told += 1
        self._spans.put(Span(timing.kind, SpanStage.EXECUTION, self._clock.here(timing.begin_ns),
                             self._clock.here(timing.end_ns), self._remote.welcome.device, facts))

    @contextlib.contextmanager
    def _timed(self, name: str, facts: Mapping[str, Any]) -> Iterator[None]:
        received, sent = self.plain.bytes_received, self.plain.bytes_sent
        begin_ns = perf_counter_ns()
        try:
            yield
        finally:
            self._spans.add(name, SpanStage.WIRE, begin_ns, **facts, bytes_sent=self.plain.bytes_sent - sent,
                            bytes_received=self.plain.bytes_received - received)
            self._free_ns = perf_counter_ns()

    def _recorded(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Close the span of recording, and count what the batch holds."""
        operations, self._sent = self._remote.nodes_sent - self._sent, self._remote.nodes_sent
        if operations:
            self._spans.add("record", SpanStage.CAPTURE, self._free_ns, operations=operations)
        kinds = [type(command) for command in batch.commands]
        runs, first = kinds.count(Run) + kinds.count(RunDelta), self._runs_sent
        self._runs_sent += runs
        return {"operations": operations, "runs": runs, "run": first, "executor": self._remote.address,
                "new_programs": kinds.count(Define), "uploads": kinds.count(Upload), "fetched": len(batch.fetch)}

