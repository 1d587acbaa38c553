"""Metrics under the names of earlier documents, of what a server knows; `djinn.metrics` has those of a client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from djinn_plugins.server.kinds.metrics import TenantTotals

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ("named_series",)

_TENANT = ("tenant",)


def named_series(totals: Mapping[str, TenantTotals]) -> Iterator[Metric]:
    """Yield the metrics by tenant.

    Args:
        totals: The statistics by label.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    execution = SummaryMetricFamily("djinn_execution_duration_seconds", "Time for which programs ran.", labels=_TENANT)
    success = GaugeMetricFamily("djinn_remote_execution_success_rate",
                                "Part of the messages whose values could all be computed.", labels=_TENANT)
    hits = CounterMetricFamily("djinn_cache_hits", "Uploads that did not have to travel.", labels=("tenant", "cache"))
    misses = CounterMetricFamily("djinn_cache_misses", "Uploads that had to travel.", labels=("tenant", "cache"))
    evictions = CounterMetricFamily("djinn_cache_evictions", "Storages that made room.", labels=("tenant", "cache"))
    usage = GaugeMetricFamily("djinn_memory_usage_bytes", "Memory of the values of sessions.", labels=_TENANT)
    pressure = CounterMetricFamily(
        "djinn_memory_pressure_events", "Storages that made room (warning), and allocations that did not fit "
                                        "(critical).", labels=("tenant", "level"))
    for label, found in totals.items():
        counts = found.counts
        execution.add_metric((label,), count_value=sum(counts.waits), sum_value=counts.device_ns / 1e9)
        answered, failed = counts.requests.get("ok", 0), counts.requests.get("failed", 0)
        failed += counts.requests.get("error", 0)
        success.add_metric((label,), answered / (answered + failed) if answered + failed else 1.0)
        evicted = sum(counts.evictions.values())
        hits.add_metric((label, "gpu"), counts.cache_hits)
        misses.add_metric((label, "gpu"), counts.cache_misses)
        evictions.add_metric((label, "gpu"), evicted)
        usage.add_metric((label,), found.amounts.held_bytes)
        pressure.add_metric((label, "warning"), evicted)
        pressure.add_metric((label, "critical"), counts.no_room)
    yield from (execution, success, hits, misses, evictions, usage, pressure)
