"""The statistics that a worker counts and reports to the gateway at intervals."""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial, reduce
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from djinn_lib_service.kinds import MemoryReport
from djinn_lib_service.kinds.transport import CountedChannel
from msgspec import Meta

from djinn.errors import ProtocolError, ProtocolVersionError, RemoteTimeoutError
from djinn_server.limits import Limited

__all__ = ("BUCKETS_S", "Amounts", "Counts", "EndedBy", "Evicted", "MemoryKind", "Meter", "Meters", "Outcome",
           "ProtocolFault", "Reason", "Report", "Reporter", "added", "fault_of", "merged", "told_of_memory")

BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram buckets of durations; longer durations are counted in one more bucket."""
REPORT_S = 0.25
"""How often a worker reports. With longer intervals, statistics per second would be inaccurate."""
STOP_TIMEOUT_S = 1.0
Outcome: TypeAlias = Literal["ok", "failed", "refused", "lost", "error"]
Reason: TypeAlias = Literal["token", "waiting_room", "worker", "ticket", "offender"] | Limited
EndedBy: TypeAlias = Literal["kicked", "max_run"]
ProtocolFault: TypeAlias = Literal["malformed", "version", "timeout"]
MemoryKind: TypeAlias = Literal["weight", "kv_cache", "activation", "gradient", "optimizer_state", "unknown",
                                "results_ahead", "moved_to_host", "mailboxes"]
Evicted: TypeAlias = Literal["results_ahead", "uploads", "weight", "kv_cache", "active_kv_cache", "activation",
                             "gradient", "optimizer_state", "unknown"]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Buckets: TypeAlias = Annotated[tuple[Count, ...], Meta(min_length=len(BUCKETS_S) + 1, max_length=len(BUCKETS_S) + 1)]
_NO_DURATIONS = (0,) * (len(BUCKETS_S) + 1)


class Counts(msgspec.Struct, frozen=True):
    """Counters, which only increase.

    Attributes:
        requests: By outcome: ``ok``; ``failed``, values could not be computed; ``refused``, beyond a limit; ``lost``,
            the client was gone before the answer; ``error``, inside the server.
        durations: Number of requests by duration, in `BUCKETS_S`.
        duration_ns: Sum of their durations.
        rejections: Refused connections and requests, by reason.
        faults: Connections that ended because of invalid data, by kind.
        received_bytes, sent_bytes: Bytes of connections.
        cache_hits, cache_misses: Uploads that the cache saved, and uploads that were not in the cache, if there is one.
        waits: Number of programs by the wait for their turn, in `BUCKETS_S`.
        wait_ns: Sum of these waits.
        device_ns: Total running time of programs.
        evictions: Evicted entries, by kind.
        restores: Number of entries moved back.
        moved_bytes: Bytes copied to the host and back.
        no_room: Number of allocations that did not fit.
        ended: Sessions that the server has ended, by cause.
        dropped: Programs that were not run, because their session had ended or cancelled them.
    """

    requests: dict[Outcome, Count] = {}
    durations: _Buckets = _NO_DURATIONS
    duration_ns: Count = 0
    rejections: dict[Reason, Count] = {}
    faults: dict[ProtocolFault, Count] = {}
    received_bytes: Count = 0
    sent_bytes: Count = 0
    cache_hits: Count = 0
    cache_misses: Count = 0
    waits: _Buckets = _NO_DURATIONS
    wait_ns: Count = 0
    device_ns: Count = 0
    evictions: dict[Evicted, Count] = {}
    restores: Count = 0
    moved_bytes: dict[Literal["out", "in"], Count] = {}
    no_room: Count = 0
    ended: dict[EndedBy, Count] = {}
    dropped: Count = 0


class Amounts(msgspec.Struct, frozen=True):
    """Current amounts.

    Attributes:
        sessions: Sessions.
        handles: Values that they hold.
        held_bytes: Bytes of the storages of these values.
        kept_bytes: Bytes of the upload cache.
        memory: Bytes by role, if there is a limit.
        pressure_tier: The tier of memory pressure.
    """

    sessions: Count = 0
    handles: Count = 0
    held_bytes: Count = 0
    kept_bytes: Count = 0
    memory: dict[MemoryKind, Count] = {}
    pressure_tier: Annotated[int, Meta(ge=0, le=2)] = 0


class Report(msgspec.Struct, frozen=True, tag="report"):
    """From a worker: its counters since it started, and its current amounts."""

    counts: Counts
    amounts: Amounts


def told_of_memory(counts: Counts, amounts: Amounts, memory: MemoryReport, waiting_bytes: int) -> Report:
    """Build a report that includes statistics of memory.

    Args:
        counts: The other counters.
        amounts: The other amounts.
        memory: The memory manager's report. Roles and kinds that metrics do not know count as unknown.
        waiting_bytes: Bytes of values that wait in mailboxes.
    """
    held = _known(memory.device, get_args(MemoryKind))
    held |= {"moved_to_host": memory.host_bytes, "mailboxes": waiting_bytes}
    return Report(
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
        self._channel = channel if isinstance(channel, CountedChannel) else None
        self._requests: Counter[Outcome] = Counter()
        self._durations = list(_NO_DURATIONS)
        self._duration_ns = 0

    def follow(self, channel: object) -> None:
        """Count the bytes of another channel instead; ``None`` stops counting bytes."""
        self._channel = channel if isinstance(channel, CountedChannel) else None

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
            self._closed = added((self._closed, meter.counts()))

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

    def __init__(self, look: Callable[[], Report], tell: Callable[[Report], None],
                 interval_s: float = REPORT_S) -> None:
        self._look = look
        self._tell = tell
        self._interval_s = interval_s
        self._last: Report | None = None
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
