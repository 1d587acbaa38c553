"""Reads a server's metrics."""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import attrs
import msgspec

from djinn.errors import ConfigurationError, ProtocolError, TransportError
from djinn_plugins.server.kinds.metrics import ProgramTime

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

__all__ = ("Reading", "TenantReading", "name_of", "printable", "read")

TIMEOUT_S = 5.0
MAX_BYTES = 2**23
"""Maximum size of the response: about ten times that of one with all labelled tenants."""
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_START = ("Start the server with --metrics-port, and give the address that its log names, such as --metrics "
          "http://127.0.0.1:9090")


@attrs.frozen
class TenantReading:
    """The metrics of one tenant. Counters start with the server.

    Attributes:
        workers: Processes that serve.
        sessions: Sessions.
        handles: Values that they hold.
        held_bytes: Bytes of the storages of these values.
        kept_bytes: Bytes of the upload cache.
        shared_bytes: Bytes of values in memory of kept uploads and stored models, in each session that uses them.
        limit_bytes: Memory limit of the sessions; 0 if there is none.
        requests: By outcome.
        request_s: Total duration of requests.
        durations: Number of requests by upper bound of the duration in seconds, cumulative; the last bound is infinite.
        waits: Number of programs by upper bound of the wait for their turns, likewise.
        device_s: Total running time of programs.
        received_bytes, sent_bytes: Bytes of connections.
        cache_requests: Uploads that the cache saved (``hit``), and uploads that were sent.
        rejections: Refused connections and requests, by reason.
        restarts: Workers that died or could not start, by cause.
        memory_by_kind: Memory of the device by role, and of the host, if there is a limit.
        evictions: Evicted entries, by kind.
        pressure_tier: Tier of memory pressure: 0, 1 or 2.
    """

    workers: int = 0
    sessions: int = 0
    handles: int = 0
    held_bytes: int = 0
    kept_bytes: int = 0
    shared_bytes: int = 0
    limit_bytes: int = 0
    requests: Mapping[str, int] = attrs.field(factory=dict)
    request_s: float = 0.0
    durations: Mapping[float, int] = attrs.field(factory=dict)
    waits: Mapping[float, int] = attrs.field(factory=dict)
    device_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    cache_requests: Mapping[str, int] = attrs.field(factory=dict)
    rejections: Mapping[str, int] = attrs.field(factory=dict)
    restarts: Mapping[str, int] = attrs.field(factory=dict)
    memory_by_kind: Mapping[str, int] = attrs.field(factory=dict)
    evictions: Mapping[str, int] = attrs.field(factory=dict)
    pressure_tier: int = 0


@attrs.frozen
class Reading:
    """One reading of a server's metrics.

    Attributes:
        at_s: Time of the reading, by this process's monotonic clock.
        not_ready: Why sessions cannot begin; empty if they can.
        build: Versions of the server's components.
        protocol_errors: Connections that ended because of invalid data, by kind.
        tenants: By label; the empty label stands for all clients if there are no tokens, and for connections without a
            tenant.
        programs: Programs that took the most time, by label; empty on another machine than the server's.
    """

    at_s: float
    not_ready: str
    build: Mapping[str, str]
    protocol_errors: Mapping[str, int]
    tenants: Mapping[str, TenantReading]
    programs: Mapping[str, Sequence[ProgramTime]] = attrs.field(factory=dict)


def read(url: str) -> Reading:
    """Read a server's metrics.

    Args:
        url: URL of its metrics, with or without ``/metrics``.

    Raises:
        ConfigurationError: The URL is invalid, or the library that parses metrics is missing.
        TransportError: The address does not answer.
        ProtocolError: The answer has another format.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ConfigurationError(
            "Reading metrics needs the package prometheus-client, which is not installed.",
            hint="Install it with: python3 -m pip install 'djinn-torch[metrics]'") from None
    target = _target(url)
    status, page = _get(target, "/metrics")
    _, ready = _get(target, "/readyz")
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except (ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"What {url} serves is no page of metrics: {printable(str(error))[:200]}.",
                            hint=_START) from None
    if status != http.client.OK or not any(sample.name == "djinn_build_info" for sample in samples):
        raise ProtocolError(f"What {url} serves are no metrics of djinn's.", hint=_START)
    not_ready = "" if ready.strip() == "ok" else printable(ready.strip())[:200] or "The server does not say why."
    return attrs.evolve(_made(samples, not_ready), programs=_programs(target))


def _programs(target: SplitResult) -> Mapping[str, Sequence[ProgramTime]]:
    """Fetch the programs of each tenant; none where the server does not show them."""
    status, page = _get(target, "/programs")
    if status != http.client.OK:
        return {}
    try:
        found = _decoder.decode(page)
    except msgspec.DecodeError:
        return {}
    return {printable(label): [msgspec.structs.replace(program, name=printable(program.name)) for program in programs]
            for label, programs in found.items()}


def _target(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        _ = target.port  # an invalid port is only detected on access
    except ValueError:
        target = SplitResult("", "", "", "", "")
    if target.scheme not in _CONNECTIONS or not target.hostname:
        raise ConfigurationError(f"{url!r} is no address of metrics.", hint="Give one such as http://127.0.0.1:9090")
    return target._replace(path=target.path.rstrip("/").removesuffix("/metrics"))


def _get(target: SplitResult, path: str) -> tuple[int, str]:
    """Fetch one page, up to the maximum size."""
    connection = _CONNECTIONS[target.scheme](target.hostname or "", target.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{target.path}{path}")
        with connection.getresponse() as response:
            status, body = response.status, response.read(MAX_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        where = f"{target.scheme}://{target.netloc}{target.path}{path}"
        raise TransportError(f"Nobody serves metrics at {where}: {printable(str(error)) or type(error).__name__}.",
                             hint=_START) from None
    finally:
        connection.close()
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"The page of {target.netloc} has more than {MAX_BYTES} bytes.", hint=_START)
    return status, body.decode("utf-8", "replace")


def _made(samples: Iterable[Sample], not_ready: str) -> Reading:
    tenants: dict[str, dict[str, float]] = {}
    labelled: dict[str, dict[str, dict[str, int]]] = {}
    buckets: dict[str, dict[str, dict[float, int]]] = {}
    build: dict[str, str] = {}
    errors: dict[str, int] = {}
    for sample in samples:
        labels = {name: printable(value) for name, value in sample.labels.items()}
        tenant = labels.pop("tenant", "")
        name = sample.name.removeprefix("djinn_")
        if name == "build_info":
            build = labels
        elif name == "protocol_errors_total":
            errors[labels.get("reason", "")] = _whole(sample.value)
        elif name in _BUCKETS:
            of_tenant = buckets.setdefault(tenant, {}).setdefault(_BUCKETS[name], {})
            of_tenant[_bound(labels.get("le", ""))] = _whole(sample.value)
        elif name in _PLAIN:
            tenants.setdefault(tenant, {})[_PLAIN[name]] = (
                max(0.0, sample.value) if name in _SECONDS and math.isfinite(sample.value) else _whole(sample.value))
        elif name in _SPLIT:
            field, label = _SPLIT[name]
            labelled.setdefault(tenant, {}).setdefault(field, {})[labels.get(label, "")] = _whole(sample.value)
    made = {}
    for tenant in {**tenants, **labelled, **buckets}:
        split = labelled.get(tenant, {})
        memory, wire = split.pop("memory", {}), split.pop("wire", {})
        plain: dict[str, Any] = {**tenants.get(tenant, {}), **split, **{
            field: dict(sorted(found.items())) for field, found in buckets.get(tenant, {}).items()}}
        made[tenant] = TenantReading(
            **plain, held_bytes=memory.get("held", 0),
            kept_bytes=memory.get("kept", 0), shared_bytes=memory.get("shared", 0), limit_bytes=memory.get("limit", 0),
            received_bytes=wire.get("received", 0), sent_bytes=wire.get("sent", 0))
    return Reading(time.monotonic(), not_ready, build, errors, made)


_PLAIN = {"workers": "workers", "sessions": "sessions", "live_handles": "handles",
          "memory_pressure_tier": "pressure_tier",
          "request_duration_seconds_sum": "request_s", "device_seconds_total": "device_s"}
"""Series whose only label is the tenant, and the corresponding attributes."""
_SECONDS = frozenset(("request_duration_seconds_sum", "device_seconds_total"))
_BUCKETS = {"request_duration_seconds_bucket": "durations", "queue_wait_seconds_bucket": "waits"}
"""Series of histograms."""
_SPLIT = {"requests_total": ("requests", "outcome"), "cache_requests_total": ("cache_requests", "result"),
          "admission_rejections_total": ("rejections", "reason"), "worker_restarts_total": ("restarts", "cause"),
          "gpu_memory_bytes": ("memory_by_kind", "kind"), "memory_evictions_total": ("evictions", "kind"),
          "memory_bytes": ("memory", "kind"), "wire_bytes_total": ("wire", "direction")}
"""Series with another label, and that label."""


def _whole(value: float) -> int:
    return int(value) if math.isfinite(value) and value > 0 else 0


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def name_of(label: str, labels: Collection[str]) -> str:
    """Return a tenant's display name. The empty label means all clients if it is the only one, otherwise no tenant."""
    return label or ("(greetings)" if len(labels) > 1 else "(everybody)")


def printable(text: str) -> str:
    """Remove characters that could affect a terminal from text of others."""
    return "".join(character if character.isprintable() else "?" for character in text)


_decoder = msgspec.json.Decoder(dict[str, list[ProgramTime]])
