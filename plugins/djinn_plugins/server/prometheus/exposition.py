"""Serves ``/metrics`` in Prometheus text format, and the liveness and readiness probes."""

from __future__ import annotations

import ipaddress
import logging
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import anyio
import anyio.to_thread
import msgspec
import torch
from anyio.abc import SocketAttribute, SocketListener, SocketStream
from anyio.from_thread import start_blocking_portal
from anyio.streams.buffered import BufferedByteReceiveStream

from djinn.errors import ConfigurationError, TransportError
from djinn.wire.messages import PROTOCOL_VERSION
from djinn_plugins.common.net.accepting import Visit, accept_forever
from djinn_plugins.common.net.host_names import HostNames
from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.common.net.urls import url_of
from djinn_plugins.server.kinds.metrics import (
    BUCKETS_S,
    Counts,
    EndedBy,
    Evicted,
    MemoryKind,
    MetricsOutput,
    MetricsSource,
    TenantTotals,
)
from djinn_plugins.server.options import MetricsOptions, ServeOptions
from djinn_plugins.server.prometheus.named import named_series
from djinn_plugins.server.tenant_limits import Limited

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

__all__ = ("MetricsPage", "PrometheusMetrics", "check_library")

READ_TIMEOUT_S = 5.0
MAX_READERS = 16
"""Maximum number of connections; a further one closes the oldest one that has not asked yet."""
MAX_HEAD_BYTES = 2**16
_TEXT = "text/plain; charset=utf-8"
_TENANT = ("tenant",)
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)


def check_library() -> None:
    """Check that the library that formats the metrics is installed.

    Raises:
        ConfigurationError: It is not.
    """
    try:
        import prometheus_client  # noqa: F401  # looked for, and used below
    except ImportError:
        raise ConfigurationError(
            "--metrics-port needs the package prometheus-client, which is not installed.",
            hint="Install it with: python3 -m pip install 'djinn-torch[metrics]'") from None


class SourceCollector:
    """Converts the statistics to metrics on each request.

    Args:
        source: The statistics.
    """

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """List all metrics; see `prometheus_client.registry.Collector`."""
        from prometheus_client.core import InfoMetricFamily

        totals = self._source.totals()
        own = self._source.gateway()
        yield InfoMetricFamily("djinn_build", "What this server is made of.", {
            "version": self._source.version, "torch": str(torch.__version__), "python": platform.python_version(),
            "protocol": str(PROTOCOL_VERSION)})
        yield from _requests(totals)
        yield from _turns(totals)
        yield from _traffic(totals, own)
        yield from _amounts(totals)
        yield from _pressure(totals)
        yield from named_series(totals)

    def describe(self) -> list[Metric]:
        """Return no metrics in advance; see `prometheus_client.registry.Collector`."""
        return []


def _requests(totals: dict[str, TenantTotals]) -> Iterator[Metric]:
    requests = _counter("requests", "Messages of clients that ended, by how.", "outcome")
    durations = _histogram("request_duration_seconds", "From when a message was there until it was carried out and "
                                                       "answered.")
    cache = _counter("cache_requests", "Uploads of sessions for which uploads are kept: hit, if it did not have to "
                                       "travel.", "result")
    restarts = _counter("worker_restarts", "Workers that died or could not begin, by why.", "cause")
    for label, found in totals.items():
        for outcome, count in {"ok": 0, "failed": 0, **found.counts.requests}.items():
            requests.add_metric((label, outcome), count)
        durations.add_metric((label,), list(_cumulative(found.counts.durations)), found.counts.duration_ns / 1e9)
        cache.add_metric((label, "hit"), found.counts.cache_hits)
        cache.add_metric((label, "miss"), found.counts.cache_misses)
        for cause, count in found.restarts.items():
            restarts.add_metric((label, cause), count)
    yield from (requests, durations, cache, restarts)


def _turns(totals: dict[str, TenantTotals]) -> Iterator[Metric]:
    waits = _histogram("queue_wait_seconds", "From when a program could have run until it was its turn.")
    used = _counter("device_seconds", "Time for which programs ran.")
    dropped = _counter("programs_dropped", "Programs that were not run, because their session had ended or cancelled "
                                           "them.")
    for label, found in totals.items():
        waits.add_metric((label,), list(_cumulative(found.counts.waits)), found.counts.wait_ns / 1e9)
        used.add_metric((label,), found.counts.device_ns / 1e9)
        dropped.add_metric((label,), found.counts.dropped)
    yield from (waits, used, dropped)


def _traffic(totals: dict[str, TenantTotals], own: Counts) -> Iterator[Metric]:
    rejections = _counter("admission_rejections", "What was not let in or not granted, by why.", "reason")
    wire = _counter("wire_bytes", "Bytes of connections with clients and peers, heads and greetings included.",
                    "direction")
    faults = _counter("protocol_errors", "Connections that said nothing sensible, by what it was.", "reason")
    by_fault: dict[str, int] = {"malformed": 0, "version": 0, "timeout": 0}
    # The gateway's own counts belong to no tenant, and have an empty tenant label.
    limited = Counts(rejections=dict.fromkeys(get_args(Limited), 0))
    counts = {label: [limited, found.counts] for label, found in totals.items()}
    counts.setdefault("", []).extend((Counts(rejections={"token": 0, "worker": 0, "waiting_room": 0}), own))
    for label, parts in counts.items():
        wire.add_metric((label, "received"), sum(part.received_bytes for part in parts))
        wire.add_metric((label, "sent"), sum(part.sent_bytes for part in parts))
        for reason in {reason for part in parts for reason in part.rejections}:
            rejections.add_metric((label, reason), sum(part.rejections.get(reason, 0) for part in parts))
        for part in parts:
            for fault, count in part.faults.items():
                by_fault[fault] += count
    for name, count in by_fault.items():
        faults.add_metric((name,), count)
    ended = _counter("sessions_ended", "Sessions that were ended for their clients, by what.", "reason")
    for by in get_args(EndedBy):
        ended.add_metric((by,), own.ended.get(by, 0))
    yield from (rejections, wire, faults, ended)


def _amounts(totals: dict[str, TenantTotals]) -> Iterator[Metric]:
    memory = _gauge("memory_bytes", "Memory: held by values of sessions, kept uploads, what values share with these "
                                    "and with stored models, and the limit that clients are told.", "kind")
    handles = _gauge("live_handles", "Values that sessions hold.")
    sessions = _gauge("sessions", "Sessions.")
    workers = _gauge("workers", "Workers that serve.")
    for label, found in totals.items():
        memory.add_metric((label, "held"), found.amounts.held_bytes)
        memory.add_metric((label, "kept"), found.amounts.kept_bytes)
        memory.add_metric((label, "shared"), found.amounts.shared_bytes)
        if found.limit_bytes:
            memory.add_metric((label, "limit"), found.limit_bytes)
        handles.add_metric((label,), found.amounts.handles)
        sessions.add_metric((label,), found.amounts.sessions)
        workers.add_metric((label,), found.workers)
    yield from (memory, handles, sessions, workers)


def _pressure(totals: dict[str, TenantTotals]) -> Iterator[Metric]:
    """Yield the metrics of memory pressure for tenants with a memory limit."""
    kinds = _gauge("gpu_memory_bytes", "Memory of the device by what it is for; and what waits in memory of the host: "
                                       "moved_to_host and mailboxes.", "kind")
    tier = _gauge("memory_pressure_tier", "How short memory is: 0 normal, 1 warning, 2 critical.")
    evictions = _counter("memory_evictions", "What had to make room, by what it was.", "kind")
    restores = _counter("memory_restores", "Storages that came back because they were used.")
    moved = _counter("memory_moved_bytes", "Bytes that were copied to the host (out) and back (in).", "direction")
    refused = _counter("memory_refusals", "Runs, uploads and reads for which there was no room.")
    for label, found in totals.items():
        counts = found.counts
        if not found.limit_bytes and not counts.evictions:
            continue
        for kind in get_args(MemoryKind):
            kinds.add_metric((label, kind), found.amounts.memory.get(kind, 0))
        tier.add_metric((label,), found.amounts.pressure_tier)
        for gone in get_args(Evicted):
            evictions.add_metric((label, gone), counts.evictions.get(gone, 0))
        restores.add_metric((label,), counts.restores)
        moved.add_metric((label, "out"), counts.moved_bytes.get("out", 0))
        moved.add_metric((label, "in"), counts.moved_bytes.get("in", 0))
        refused.add_metric((label,), counts.no_room)
    yield from (kinds, tier, evictions, restores, moved, refused)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    own = () if name in ("protocol_errors", "sessions_ended") else _TENANT
    return CounterMetricFamily(f"djinn_{name}", text, labels=(*own, *labels))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(f"djinn_{name}", text, labels=(*_TENANT, *labels))


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    from prometheus_client.core import HistogramMetricFamily

    return HistogramMetricFamily(f"djinn_{name}", text, labels=_TENANT)


def _cumulative(counts: Sequence[int]) -> Iterator[tuple[str, float]]:
    count = 0
    for bound, more in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
        count += more
        yield bound, count


class MetricsPage(MetricsOutput):
    """Serves ``/metrics``, ``/programs``, ``/healthz`` and ``/readyz`` over HTTP.

    Args:
        options: Where to listen.
        source: The statistics.

    Raises:
        TransportError: The address cannot be listened on.
        ConfigurationError: The library is missing.

    Concurrency:
        `start` and `stop` are called by one thread.
    """

    def __init__(self, options: MetricsOptions, source: MetricsSource) -> None:
        check_library()
        host, port = options.host, options.port or 0
        from prometheus_client import CollectorRegistry

        self._registry = registry = CollectorRegistry(auto_describe=False)
        registry.register(SourceCollector(source))
        try:
            family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                         flags=socket.AI_PASSIVE)[0]
            self._socket = _listening(family, target)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"Metrics cannot be served on {host!r}, port {port}: {error}.",
                                 hint="Choose a free port with --metrics-port (0 finds one), and an address of this "
                                      "machine with --metrics-host.") from None
        self.address = url_of("http", host, self._socket.getsockname()[1])
        self._source = source
        self._names = HostNames(host, options.names)
        self._running = ExitStack()

    def start(self) -> None:
        """Start serving."""
        portal = self._running.enter_context(start_blocking_portal(name="djinn-metrics"))
        self._running.callback(portal.call, portal.stop, True)
        portal.start_task_soon(self._listen)
        _log.info("metrics on %s/metrics", self.address)

    def stop(self) -> None:
        """Stop serving."""
        self._running.close()
        self._socket.close()

    async def _listen(self) -> None:
        await accept_forever(await SocketListener.from_socket(self._socket), self._serve, MAX_READERS)

    async def _serve(self, stream: SocketStream, visit: Visit) -> None:
        try:
            with anyio.fail_after(READ_TIMEOUT_S):
                head = await BufferedByteReceiveStream(stream).receive_until(b"\r\n\r\n", MAX_HEAD_BYTES)
            method, path, headers = _parsed(head)
            reader = str(stream.extra(SocketAttribute.remote_address)[0])  # noqa: S610  # no part of Django
            _log.debug("metrics: %s: %s %s", reader, method, path)
            # Formatting takes as long as there are tenants; meanwhile, the loop answers probes.
            with visit.busy():
                status, content_type, body = await anyio.to_thread.run_sync(self._answer, method, path, headers, reader)
            with anyio.fail_after(READ_TIMEOUT_S):
                await stream.send(f"HTTP/1.0 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
                                  f"Content-Length: {len(body)}\r\n\r\n".encode() + (b"" if method == "HEAD" else body))
        except (OSError, anyio.BrokenResourceError, anyio.IncompleteRead, anyio.DelimiterNotFound) as error:
            _strangers.write(logging.INFO, "readers of metrics that left", "a reader of metrics left before it was "
                             "answered: %s", error)

    def _answer(self, method: str, path: str, headers: Mapping[str, str], reader: str) -> tuple[int, str, bytes]:
        from prometheus_client.exposition import choose_encoder

        # Browsers, which other pages may lead here, always name a host; simple probes need not. Who asks whether the
        # server lives learns nothing else.
        if path not in ("/healthz", "/readyz") and not self._names.has(headers.get("host", "localhost")):
            return 421, _TEXT, b"This server is known by other names: use its address, or --metrics-name.\n"
        if method not in ("GET", "HEAD"):
            return 501, _TEXT, b"There is GET.\n"
        if path == "/metrics":
            encode, content_type = choose_encoder(headers.get("accept", ""))
            return 200, content_type, encode(self._registry)
        if path == "/programs":
            return self._programs(reader)
        reason = {"/healthz": lambda: "", "/readyz": self._source.why_not_ready}.get(
            path, lambda: "There is /metrics, /programs, /healthz and /readyz.")()
        status = 200 if not reason else 503 if path == "/readyz" else 404
        return status, _TEXT, f"{reason or 'ok'}\n".encode()

    def _programs(self, reader: str) -> tuple[int, str, bytes]:
        """List the slow programs of each tenant. What tenants compute concerns no other machine."""
        if not ipaddress.ip_address(reader.partition("%")[0]).is_loopback:
            return 403, _TEXT, b"Programs are shown to readers on the server's own machine.\n"
        programs = {label: found.programs for label, found in self._source.totals().items()}
        return 200, "application/json", msgspec.json.encode(programs)

    def export(self) -> None:
        """Format the page, as for a reader."""
        from prometheus_client import generate_latest

        generate_latest(self._registry)


class PrometheusMetrics:
    """The output ``prometheus``; see `djinn_plugins.server.kinds.metrics.MetricsFactory`."""

    name = "prometheus"

    def open(self, options: ServeOptions, source: MetricsSource) -> MetricsOutput | None:
        """Open the page, if there is a port for it."""
        return None if options.metrics.port is None else MetricsPage(options.metrics, source)

    def sample(self, folder: Path) -> ServeOptions:
        """Return options with a free port; see `djinn_plugins.server.kinds.metrics.SamplingMetricsFactory`."""
        return ServeOptions(metrics=MetricsOptions(port=0))


def _listening(family: socket.AddressFamily, target: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(target)
        made.listen()
    except BaseException:
        made.close()
        raise
    return made


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, path and headers of a request; empty ones for anything else."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return method, rest.partition(" ")[0].partition("?")[0], headers
