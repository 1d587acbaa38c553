"""Spans: where the time of operations goes. They cost nothing unless they are collected."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from djinn_lib_service.wrapping import ConnectionWrapper

from djinn.kinds.transport import Connection
from djinn.wire.messages import Batch, Define, Result, Run, RunDelta, Upload

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
    """Counts; and ``is_estimated`` if a remote executor was only observed from the client."""


class Spans:
    """The spans of one session, while they are collected.

    Attributes:
        dropped: How many did not fit.
        executions: How many batches an executor has reported.

    Concurrency:
        Any thread may add.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.dropped = 0
        self.executions = 0

    def __iter__(self) -> Iterator[Span]:
        return iter(sorted(self._spans, key=lambda span: (span.begin_ns, -span.end_ns)))

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, name: str, stage: SpanStage, begin_ns: int, **facts: Any) -> None:
        """Add a span that ends now, on this thread."""
        self.executions += stage is SpanStage.EXECUTION
        if len(self._spans) >= MAX_SPANS:
            self.dropped += 1
            return
        self._spans.append(Span(name, stage, begin_ns, time.perf_counter_ns(), threading.current_thread().name, facts))

    @contextlib.contextmanager
    def timed(self, name: str, stage: SpanStage, **facts: Any) -> Iterator[None]:
        """Add a span for the duration of the block, also if it raises."""
        begin_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, stage, begin_ns, **facts)


current: Spans | None = None
"""Where an executor in this process reports its work; ``None`` if spans are not collected. Read once per batch."""


@contextlib.contextmanager
def spans_of(session: Session) -> Iterator[Spans]:
    """Collect a session's spans for the length of a block. One block at a time.

    Raises:
        RuntimeError: Another block is already collecting.
    """
    global current
    if current is not None:
        raise RuntimeError("Spans are being collected already.")
    spans = Spans()
    with connections_through(session, lambda remote, plain: _TimedConnection(plain, spans, remote)):
        current = spans
        try:
            yield spans
        finally:
            current = None


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


class _TimedConnection(ConnectionWrapper):
    """A connection that measures how long its requests take."""

    def __init__(self, plain: Connection, spans: Spans, remote: RemoteExecutor) -> None:
        super().__init__(plain)
        self._spans = spans
        self._remote = remote
        self._free_ns = time.perf_counter_ns()
        self._sent = remote.nodes_sent
        self._waiting_ns: int | None = None
        """Since when the executor has been busy, as far as the client knows; ``None`` if it is idle."""

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Submit a batch."""
        facts = self._recorded(batch, tensors)
        with self._timed("hand over", facts):
            self.plain.submit(batch, tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Submit a batch and wait for its answer."""
        facts = self._recorded(batch, tensors)
        told = self._spans.executions
        with self._timed("ask and wait", facts):
            answer = self.plain.request(batch, tensors)
        begin_ns, self._waiting_ns = self._waiting_ns, None
        if self._spans.executions == told and begin_ns is not None:
            self._spans.add("executor, seen from here", SpanStage.EXECUTION, begin_ns, is_estimated=True)
        return answer

    @contextlib.contextmanager
    def _timed(self, name: str, facts: Mapping[str, Any]) -> Iterator[None]:
        received, sent = self.plain.bytes_received, self.plain.bytes_sent
        begin_ns = time.perf_counter_ns()
        if self._waiting_ns is None:
            self._waiting_ns = begin_ns
        try:
            yield
        finally:
            self._spans.add(name, SpanStage.WIRE, begin_ns, **facts, bytes_sent=self.plain.bytes_sent - sent,
                            bytes_received=self.plain.bytes_received - received)
            self._free_ns = time.perf_counter_ns()

    def _recorded(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Close the span of recording, and count what the batch holds."""
        operations, self._sent = self._remote.nodes_sent - self._sent, self._remote.nodes_sent
        if operations:
            self._spans.add("record", SpanStage.CAPTURE, self._free_ns, operations=operations)
        kinds = [type(command) for command in batch.commands]
        return {"operations": operations, "runs": kinds.count(Run) + kinds.count(RunDelta),
                "new_programs": kinds.count(Define), "uploads": kinds.count(Upload), "fetched": len(batch.fetch)}

