"""The metrics of a client, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from djinn.errors import DjinnError
from djinn.record.devices import logical_device
from djinn.session import runtime
from djinn_plugins.common.tracing.totals import TOTALS, DurationSum

__all__ = ("metrics",)

_Sample = tuple[Mapping[str, str], float]


def metrics() -> str:
    """Return the metrics of this process since it started, in the text format of Prometheus.

    Counters continue from session to session. Only `djinn_memory_usage_bytes` asks the servers; all other samples are
    counted here. Without a session, none is started.
    """
    return "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    counts = TOTALS.sessions.copy()
    session = runtime._session
    if session is not None:
        counts.update(session.stats())
    yield from _counter("capture_operations", "Operations that were recorded.", counts["operations"])
    yield from _summary("capture_duration_seconds", "Time to record calls that a session had not seen before; others "
                                                    "take microseconds, and are not measured.", TOTALS.planned)
    yield from _counter("shape_inference_failures", "Calls whose shapes the executor had to be asked for.",
                        TOTALS.unanswered_shapes)
    yield from _counter("slow_shape_rules", "Calls whose shapes took long to infer.", TOTALS.slow_shape_rules)
    yield from _summary("schedule_duration_seconds", "Time of schedulers.", TOTALS.schedules)
    yield from _family("schedule_strategy_used", "Schedules by scheduler.", "gauge",
                       [({"strategy": name}, count) for name, count in sorted(TOTALS.strategies.items())])
    yield from _summary("execution_duration_seconds", "Time of requests, from sending to the answer.", TOTALS.requests)
    yield from _family("execution_strategy_used", "Messages: subgraph if the program waited for the answer, streaming "
                                                  "if not, local if the executor is in this process.", "gauge",
                       [({"strategy": name}, TOTALS.batches[name]) for name in ("subgraph", "streaming", "local")])
    asked = TOTALS.requests.count
    yield from _family("remote_execution_success_rate", "Part of the requests that were answered.", "gauge",
                       [({}, 1 - TOTALS.failed_requests / asked if asked else 1.0)])
    yield from _caches(counts)
    yield from _family("memory_usage_bytes", "Memory that the session's values take on each device.", "gauge",
                       list(_memory()))
    yield from _family("memory_pressure_events_total", "Answers that reported a lack of memory. Servers also count "
                                                       "warnings.", "counter",
                       [({"level": "critical"}, TOTALS.memory_failures)])


def _caches(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the metrics of caches: programs (graph), uploads (gpu), and results (materialization)."""
    run, defined = TOTALS.programs_run, TOTALS.programs_defined
    reused = sum(counts.get(name, 0) for name in ("results_reused", "results_not_fetched", "answered_at_home"))
    yield from _by_cache("hits", "What did not have to be sent, or computed, or fetched again.", max(0, run - defined),
                         TOTALS.uploads_known, reused)
    yield from _by_cache("misses", "What had to be sent, or computed and fetched.", defined, TOTALS.uploads,
                         counts.get("materializations", 0))
    yield from _by_cache("evictions", "Entries that made room for others.",
                         max(0, counts.get("programs_sent", 0) - counts.get("programs_known", 0)), 0,
                         counts.get("results_dropped", 0))


def _by_cache(name: str, text: str, graph: int, gpu: int, materialization: int) -> Iterator[str]:
    samples = {"graph": graph, "gpu": gpu, "materialization": materialization}
    return _family(f"cache_{name}_total", text, "counter", [({"cache": key}, count) for key, count in samples.items()])


def _memory() -> Iterator[_Sample]:
    """Ask each device for the memory of the session's values; a server that does not answer has no sample."""
    session = runtime._session
    if session is None:
        return
    kind = logical_device().type
    for index in range(session.backend.device_count):
        try:
            yield {"device": f"{kind}:{index}"}, torch.get_device_module(kind).memory_allocated(index)
        except DjinnError:
            continue


def _counter(name: str, text: str, count: float) -> Iterator[str]:
    return _family(f"{name}_total", text, "counter", [({}, count)])


def _summary(name: str, text: str, durations: DurationSum) -> Iterator[str]:
    yield from _family(name, text, "summary", [])
    yield f"djinn_{name}_count {durations.count}"
    yield f"djinn_{name}_sum {durations.seconds!r}"


def _family(name: str, text: str, kind: str, samples: list[_Sample]) -> Iterator[str]:
    yield f"# HELP djinn_{name} {text}"
    yield f"# TYPE djinn_{name} {kind}"
    for labels, value in samples:
        told = ",".join(f'{key}="{label}"' for key, label in labels.items())
        yield f"djinn_{name}{{{told}}} {value}" if told else f"djinn_{name} {value}"
