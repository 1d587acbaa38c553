"""The statistics that a worker counts and reports to the gateway at intervals."""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial, reduce
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from djinn.errors import ProtocolError, ProtocolVersionError, RemoteTimeoutError
from djinn_plugins.common.kinds.memory import MemoryReport
from djinn_plugins.common.kinds.transport import SupportsByteCounts
from djinn_plugins.common.settings.connection import MAX_NAME
from djinn_plugins.server.abilities import supports
from djinn_plugins.server.kinds.metrics import (
    BUCKETS_S,
    MAX_PROGRAMS,
    NO_DURATIONS,
    Amounts,
    Count,
    Counts,
    EndedBy,
    Evicted,
    MemoryKind,
    Outcome,
    ProgramTime,
    ProtocolFault,
    Reason,
)

__all__ = ("MAX_NAMED", "REPORT_S", "Meter", "Meters", "Reporter", "WorkerReport", "added", "fault_of", "merged",
           "told_of_memory")

REPORT_S = 0.25
"""How often a worker reports. With longer intervals, statistics per second would be inaccurate."""
STOP_TIMEOUT_S = 1.0
MAX_NAMED = 1000
"""Most named sessions that a worker reports."""


class WorkerReport(msgspec.Struct, frozen=True, tag="report"):
    """From a worker: its counters since it started, and what it has at present.

    Attributes:
        counts: The counters.
        amounts: Its current amounts.
        programs: The programs that took the most time.
        named: The names of its named sessions, and when each began, in seconds since 1970.
    """

    counts: Counts
    amounts: Amounts
    programs: Annotated[tuple[ProgramTime, ...], Meta(max_length=MAX_PROGRAMS)] = ()
    named: Annotated[tuple[tuple[Annotated[str, Meta(max_length=MAX_NAME)], Count], ...],
                     Meta(max_length=MAX_NAMED)] = ()


def told_of_memory(counts: Counts, amounts: Amounts, memory: MemoryReport, waiting_bytes: int) -> WorkerReport:
    """Build a report that includes statistics of memory.

    Args:
        counts: The other counters.
        amounts: The other amounts.
        memory: The memory manager's report. Roles and kinds that metrics do not know count as unknown.
        waiting_bytes: Bytes of values that wait in mailboxes.
    """
    held = _known(memory.device, get_args(MemoryKind))
    held |= {"moved_to_host": memory.host_bytes, "mailboxes": waiting_bytes}
    return WorkerReport(
        msgspec.structs.replace(
            counts, evictions=_known(memory.evictions, get_args(Evicted)), restores=memory.restored,
            no_room=memory.refused, moved_bytes={"out": memory.moved_out_bytes, "in": memory.moved_in_bytes}),
        msgspec.structs.replace(amounts, memory=held, pressure_tier=memory.pressure))


def _known(counts: Mapping[str, int], names: Container[str]) -> dict[Any, int]:
    made: Counter[str] = Counter()
    for name, count in counts.items():
        made[name if name in names else "unknown"] += count
    return dict(made)


def added(all_counts: Iterable[Counts]) -> Counts:
    """Return the sum of counters."""
    return reduce(partial(merged, operator.add), all_counts, Counts())


def merged(merge: Callable[[int, int], int], one: Counts, other: Counts) -> Counts:
    """Merge two sets of counters, pair by pair."""
    made: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(one).items():
        more = getattr(other, name)
        if isinstance(value, dict):
            made[name] = {key: merge(value.get(key, 0), more.get(key, 0)) for key in {**value, **more}}
        elif isinstance(value, tuple):
            made[name] = tuple(map(merge, value, more))
        else:
            made[name] = merge(value, more)
    return Counts(**made)


def fault_of(error: Exception) -> ProtocolFault | None:
    """Return the kind of protocol violation that an error stands for; ``None`` if it is none."""
    if isinstance(error, ProtocolVersionError):
        return "version"
    if isinstance(error, ProtocolError):
        return "malformed"
    return "timeout" if isinstance(error, RemoteTimeoutError) else None


class Meter:
    """Counters of one connection.

    Args:
        channel: The connection.

    Attributes:
        dropped: See `Counts`.

    Concurrency:
        `answered` and `refused` are called by the connection's thread; `counts` by any.
    """

    dropped = 0

    def __init__(self, channel: object) -> None:
        self._channel = channel if supports(channel, SupportsByteCounts) else None
        self._requests: Counter[Outcome] = Counter()
        self._durations = list(NO_DURATIONS)
        self._duration_ns = 0

    def follow(self, channel: object) -> None:
        """Count the bytes of another channel instead; ``None`` stops counting bytes."""
        self._channel = channel if supports(channel, SupportsByteCounts) else None

    def answered(self, outcome: Outcome, duration_ns: int) -> None:
        """Count a request that was executed."""
        self._requests[outcome] += 1
        self._durations[bisect_left(BUCKETS_S, duration_ns * 1e-9)] += 1
        self._duration_ns += duration_ns

    def refused(self) -> None:
        """Count a request that was refused."""
        self._requests["refused"] += 1

    def counts(self) -> Counts:
        """Return the counters."""
        channel = self._channel
        return Counts(
            dict(self._requests.copy()), tuple(self._durations), self._duration_ns,
            received_bytes=0 if channel is None else channel.bytes_received,
            sent_bytes=0 if channel is None else channel.bytes_sent, dropped=self.dropped)


class Meters:
    """Counters of all connections of a process.

    Concurrency:
        Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Meter, None] = {}
        self._closed = Counts()
        self._rejections: Counter[Reason] = Counter()
        self._faults: Counter[ProtocolFault] = Counter()
        self._ended: Counter[EndedBy] = Counter()

    def open(self, channel: object) -> Meter:
        """Start the counters of a connection."""
        meter = Meter(channel)
        with self._lock:
            self._open[meter] = None
        return meter

    def close(self, meter: Meter) -> None:
        """Stop the counters of a connection; their values are kept."""
        with self._lock:
            del self._open[meter]
            self._closed = merged(operator.add, self._closed, meter.counts())

    def reject(self, reason: Reason) -> None:
        """Count a refused connection or request."""
        with self._lock:
            self._rejections[reason] += 1

    def end(self, by: EndedBy, count: int = 1) -> None:
        """Count sessions that were ended."""
        with self._lock:
            self._ended[by] += count

    def ended(self, error: Exception) -> None:
        """Count the end of a connection, if the error is a protocol violation."""
        fault = fault_of(error)
        if fault is not None:
            with self._lock:
                self._faults[fault] += 1

    def counts(self) -> Counts:
        """Return the counters."""
        with self._lock:
            own = Counts(rejections=dict(self._rejections), faults=dict(self._faults), ended=dict(self._ended))
            return added((self._closed, own, *(meter.counts() for meter in self._open)))


class Reporter:
    """Sends reports at intervals, if anything has changed.

    Args:
        look: Returns the report.
        tell: Sends the report; an `OSError` stops the reporter.
        interval_s: Time between reports.

    Concurrency:
        `stop` is called by one thread, once.
    """

    def __init__(self, look: Callable[[], WorkerReport], tell: Callable[[WorkerReport], None],
                 interval_s: float = REPORT_S) -> None:
        self._look = look
        self._tell = tell
        self._interval_s = interval_s
        self._last: WorkerReport | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="djinn-report", daemon=True)

    def start(self) -> None:
        """Start sending reports."""
        self._thread.start()

    def stop(self) -> None:
        """Send a last report."""
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._interval_s):
                self._tell_once()
            self._tell_once()
        except OSError:
            # The gateway is gone or does not read. The thread that reads its orders notices that and logs it.
            return

    def _tell_once(self) -> None:
        found = self._look()
        if found != self._last:
            self._tell(found)
            self._last = found
