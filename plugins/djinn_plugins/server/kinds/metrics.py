"""Metrics: what a server counts, and where it is shown or written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

import attrs
import msgspec
from msgspec import Meta

from djinn.ir.phase import ExecutionPhase
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenant_limits import Limited

if TYPE_CHECKING:
    from djinn_plugins.common.operators.stored_models import StoredModel

__all__ = ("BUCKETS_S", "MAX_PROGRAMS", "MAX_PROGRAM_NAME", "NO_DURATIONS", "Amounts", "Counts", "EndedBy", "Evicted",
           "MemoryKind", "MetricsFactory", "MetricsOutput", "MetricsSource", "Outcome", "PeriodicOutput", "ProgramTime",
           "ProtocolFault", "Reason", "SamplingMetricsFactory", "TenantTotals")

STOP_TIMEOUT_S = 5.0
_log = logging.getLogger("djinn.server")
BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram buckets of durations; longer durations are counted in one more bucket."""
Outcome: TypeAlias = Literal["ok", "failed", "refused", "lost", "error"]
Reason: TypeAlias = Literal["token", "waiting_room", "worker", "ticket", "offender", "admission"] | Limited
EndedBy: TypeAlias = Literal["kicked", "max_run"]
ProtocolFault: TypeAlias = Literal["malformed", "version", "timeout"]
MemoryKind: TypeAlias = Literal["weight", "kv_cache", "activation", "gradient", "optimizer_state", "unknown",
                                "results_ahead", "moved_to_host", "mailboxes"]
Evicted: TypeAlias = Literal["results_ahead", "uploads", "weight", "kv_cache", "active_kv_cache", "activation",
                             "gradient", "optimizer_state", "unknown"]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Buckets: TypeAlias = Annotated[tuple[Count, ...], Meta(min_length=len(BUCKETS_S) + 1, max_length=len(BUCKETS_S) + 1)]
NO_DURATIONS = (0,) * (len(BUCKETS_S) + 1)
MAX_PROGRAMS = 10
"""How many programs of a tenant are named."""
MAX_PROGRAM_NAME = 120
"""Longest name of a program."""


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
    durations: _Buckets = NO_DURATIONS
    duration_ns: Count = 0
    rejections: dict[Reason, Count] = {}
    faults: dict[ProtocolFault, Count] = {}
    received_bytes: Count = 0
    sent_bytes: Count = 0
    cache_hits: Count = 0
    cache_misses: Count = 0
    waits: _Buckets = NO_DURATIONS
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
        kept_bytes: Bytes of the upload cache; of uploads that several workers share, each is charged an equal part.
        memory: Bytes by role, if there is a limit.
        pressure_tier: The tier of memory pressure.
        shared_bytes: Bytes of values in memory of kept uploads and stored models, in each session that uses them; the
            memory exists once.
    """

    sessions: Count = 0
    handles: Count = 0
    held_bytes: Count = 0
    kept_bytes: Count = 0
    memory: dict[MemoryKind, Count] = {}
    pressure_tier: Annotated[int, Meta(ge=0, le=2)] = 0
    shared_bytes: Count = 0


class ProgramTime(msgspec.Struct, frozen=True, array_like=True):
    """How long a program of a tenant ran. Programs with the same name and phase count as one.

    Attributes:
        name: The operators that it calls most often.
        phase: The phase that its client names, if any.
        runs: How often it ran.
        total_ns: Running time of all runs, on the device.
        longest_ns: Running time of the longest one.
    """

    name: Annotated[str, Meta(max_length=MAX_PROGRAM_NAME)]
    phase: ExecutionPhase
    runs: Count
    total_ns: Count
    longest_ns: Count


@attrs.frozen
class TenantTotals:
    """The statistics of one label's workers.

    Attributes:
        counts: The sum of their counters.
        amounts: The sum of their current amounts.
        limit_bytes: Memory limit of their sessions; 0 if there is none.
        workers: Number of workers that serve.
        restarts: Number of restarts, by cause.
        programs: At most `MAX_PROGRAMS` programs that took the most time, that with the longest time first. Other
            programs take their places: they are for people to read, and no series.
        named: What stands for their named sessions, and when each began, in seconds since 1970; see
            `djinn_plugins.server.tenants.session_digest`.
    """

    counts: Counts = attrs.field(factory=Counts)
    amounts: Amounts = attrs.field(factory=Amounts)
    limit_bytes: int = 0
    workers: int = 0
    restarts: dict[str, int] = attrs.field(factory=dict)
    programs: tuple[ProgramTime, ...] = ()
    named: tuple[tuple[str, int], ...] = ()


class MetricsSource(Protocol):
    """The statistics of a server.

    Concurrency:
        Any thread.
    """

    @property
    def version(self) -> str:
        """Version of djinn."""

    @property
    def address(self) -> str:
        """The address that clients connect to."""

    def tenant_of(self, token: str) -> str:
        """Return the name of the tenant that a token belongs to; empty if all clients are one tenant.

        Raises:
            RefusedError: The token is not valid.
        """

    def operate(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Execute a command of the operator, as ``djinn sessions`` and ``djinn kick`` do. It waits for the gateway.

        Raises:
            DjinnError: It has failed, or there is no such command.
        """

    def pages(self) -> Sequence[str]:
        """Return the URLs where metrics can be read, as the outputs name them."""

    def models(self) -> Sequence[StoredModel]:
        """Return the models of its store. Files that are new are read first, which can take long."""

    def totals(self) -> dict[str, TenantTotals]:
        """Return the statistics by label: the name of a tenant, ``(other)``, or empty if all clients are one tenant.

        There are at most 101 labels. Counters never fall, also when workers are replaced.
        """

    def gateway(self) -> Counts:
        """Return the counters of connections whose tenant is not known."""

    def why_not_ready(self) -> str:
        """Return why sessions cannot begin at the moment; empty if they can."""


class MetricsOutput:
    """Shows or writes metrics. It runs in the gateway, in separate threads.

    Attributes:
        address: Where metrics can be read; empty for nowhere.

    Concurrency:
        `start` and `stop` are called by one thread, once each; `export` by any thread between them.

    Laws:
        metrics.takes_all_totals, metrics.source_unchanged, metrics.stop_is_final, metrics.restarts_independently
    """

    address: str = ""

    def start(self) -> None:
        """Start."""

    def stop(self) -> None:
        """Stop, and end all threads. The source must not be read afterwards."""

    def export(self) -> None:
        """Read the source, and write or format its figures."""


class PeriodicOutput(MetricsOutput):
    """An output that exports at intervals, and once more when it stops. Subclasses implement `export`.

    An exception of `export` is logged, and the next interval tries again.

    Args:
        interval_s: Time between exports.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="djinn-metrics", daemon=True)

    def start(self) -> None:
        """Start exporting."""
        self._thread.start()

    def stop(self) -> None:
        """Export once more, and stop."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(self._interval_s)
            try:
                self.export()
            except Exception:  # noqa: BLE001  # logged in full; metrics must not affect sessions
                _log.exception("metrics could not be exported")


class MetricsFactory(Protocol):
    """Opens an output of metrics; what plugins register."""

    name: str
    """Name in the configuration."""

    def open(self, options: ServeOptions, source: MetricsSource) -> MetricsOutput | None:
        """Open the output.

        Args:
            options: The server's options.
            source: What to show or write.

        Returns:
            ``None`` if the options ask for no such output.

        Raises:
            ConfigurationError, TransportError: It cannot be opened; the server then does not start.
        """


@runtime_checkable
class SamplingMetricsFactory(Protocol):
    """A `MetricsFactory` whose laws can be tested."""

    def sample(self, folder: Path) -> ServeOptions:
        """Return options that ask for the output.

        Args:
            folder: An empty folder, for files that it needs.
        """
