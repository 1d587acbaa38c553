"""Runs a scheduled graph and records when each part ran, by the executors' own clocks."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import torch

from djinn.kinds.connection_wrapper import ConnectionWrapper
from djinn.session import runtime
from djinn.wire.messages import Batch, Result, RunDelta, Send, Timing
from djinn.wire.messages import Run as RunCommand
from djinn_plugins.common.tracing.spans import ServerClock, connections_through
from djinn_plugins.schedule.execution import ScheduledRun, flushing
from djinn_plugins.schedule.inputs import Inputs
from djinn_plugins.schedule.lazy_tuple import LazyTuple
from djinn_plugins.schedule.schedule import ExecutionSchedule, StepSpan

if TYPE_CHECKING:
    from djinn.kinds import Connection

__all__ = ("MeasuredPiece", "MeasuredTransfer", "Measurement", "measure")


@attrs.frozen
class MeasuredPiece:
    """A run of nodes on one device, and when it ran, in seconds from the start of the first one."""

    device: str
    nodes: tuple[str, ...]
    span: StepSpan


@attrs.frozen
class MeasuredTransfer:
    """A value that moved between servers, with the times of sending and arrival."""

    value: str
    source: str
    target: str
    span: StepSpan


@attrs.frozen
class Measurement:
    """The result of `measure`."""

    results: LazyTuple
    pieces: tuple[MeasuredPiece, ...]
    transfers: tuple[MeasuredTransfer, ...] = ()


def measure(schedule: ExecutionSchedule, inputs: Inputs = None, *, pieces: int = 16) -> Measurement:
    """Run a scheduled graph and measure when its parts ran; `djinn.explain` draws the result beside the plan.

    The graph is submitted in pieces, one after the other without waiting, and executors report when each piece ran. An
    executor compiles programs at their first run, so a graph that writes nothing and draws no random numbers runs twice
    before the measurement.

    Args:
        schedule: The result of `djinn.schedule`.
        inputs: As for `djinn.execute`.
        pieces: Approximate number of pieces. A piece also ends where the device changes.

    Raises:
        ScheduleError, InputsError: As for `djinn.execute`.
        Exception: Any exception of an operation.
    """
    run = ScheduledRun(runtime.current(), schedule, inputs, None, runs_all=True)
    session = run.session
    names = [name for name, _ in sorted(run.positions.items(), key=lambda item: item[1])]
    ends = run.ends(max(1, -(-len(schedule.order) // max(1, pieces))))
    for _ in range(2 if run.is_repeatable else 0):
        _pass(run, ends)
    with connections_through(session, lambda remote, plain: _Watch(plain)) as watches:
        cuts, results = _pass(run, ends)
        # The last request is answered at once, which shows the difference between the clocks.
        session.synchronize()
    found = _pieces(schedule, ends, cuts, watches, names)
    moves = _moves(watches, names)
    begin_s = min([piece.span.begin_s for piece in found] + [move.span.begin_s for move in moves], default=0.0)
    return Measurement(results, tuple(_shifted(piece, begin_s) for piece in found),
                       tuple(_shifted(move, begin_s) for move in moves))


def _pass(run: ScheduledRun, ends: dict[int, int]) -> tuple[dict[int, list[int]], LazyTuple]:
    """Run once, in pieces.

    Returns:
        For each end of a piece, how many runs each executor had received by then; and the results.
    """
    session = run.session
    cuts: dict[int, list[int]] = {}

    def between(position: int) -> None:
        if position in ends:
            session.flush()
            cuts[position] = [getattr(remote.connection, "runs", 0) for remote in session.backend.executors]

    session.synchronize()
    with flushing(session, None):
        results = run.remotely(between)
    session.synchronize()
    return cuts, results


class _Watch(ConnectionWrapper):
    """A connection that requests timings, and otherwise forwards to the wrapped connection.

    Attributes:
        runs: How many runs were submitted.
        sent: Transfers that this executor sends: their value and the executor that they go to.
        timings: The reported timings.
    """

    def __init__(self, plain: Connection) -> None:
        super().__init__(plain)
        self.runs = 0
        self.sent: dict[int, tuple[int, int]] = {}
        self.timings: list[Timing] = []
        self._clock = ServerClock()

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Submit a batch."""
        self.plain.submit(self._asking(batch), tensors)

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Submit a batch and wait for its answer."""
        asking = self._asking(batch)
        begin_ns = monotonic_ns()
        result, data = self.plain.request(asking, tensors)
        self._clock.compare(begin_ns, monotonic_ns(), result.now_ns)
        self.timings += result.timings
        return result, data

    def _asking(self, batch: Batch) -> Batch:
        for command in batch.commands:
            self.runs += isinstance(command, (RunCommand, RunDelta))
            if isinstance(command, Send):
                self.sent[command.transfer] = command.handle, command.peer
        return msgspec.structs.replace(batch, timed=True)

    def span(self, timing: Timing) -> StepSpan:
        """Convert a timing to the clock of this machine."""
        return StepSpan(self._clock.here(timing.begin_ns) / 1e9, self._clock.here(timing.end_ns) / 1e9)

    def told(self, kind: str) -> list[Timing]:
        """List the timings of a kind, in order."""
        return [timing for timing in self.timings if timing.kind == kind]


def _pieces(
    schedule: ExecutionSchedule, ends: dict[int, int], cuts: dict[int, list[int]], watches: Sequence[_Watch],
    names: Sequence[str],
) -> list[MeasuredPiece]:
    """Match pieces with the times of their runs; runs are reported in the order of submission."""
    runs = [[watch.span(timing) for timing in watch.told("run")] for watch in watches]
    before = [0] * len(watches)
    found = []
    for last, first in sorted(ends.items()):
        device = schedule.devices[schedule.order[first]]
        executor = names.index(device)
        spans = runs[executor][before[executor] : cuts[last][executor]]
        before = cuts[last]
        if spans:
            nodes = schedule.order[first : last + 1]
            found.append(MeasuredPiece(device, nodes, StepSpan(spans[0].begin_s, spans[-1].end_s)))
    return found


def _moves(watches: Sequence[_Watch], names: Sequence[str]) -> list[MeasuredTransfer]:
    begun = {timing.number: (executor, watch.span(timing).begin_s)
             for executor, watch in enumerate(watches) for timing in watch.told("send")}
    found = []
    for target, watch in enumerate(watches):
        for timing in watch.told("receive"):
            if timing.number in begun:
                source, begin_s = begun[timing.number]
                handle, _ = watches[source].sent[timing.number]
                end_s = max(begin_s, watch.span(timing).end_s)
                found.append(MeasuredTransfer(f"v{handle}", names[source], names[target], StepSpan(begin_s, end_s)))
    return found


def _shifted(measured: Any, begin_s: float) -> Any:
    span = measured.span
    return attrs.evolve(measured, span=StepSpan(span.begin_s - begin_s, span.end_s - begin_s))
