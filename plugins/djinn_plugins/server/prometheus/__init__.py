"""The output of metrics ``prometheus``: serves ``/metrics`` in its text format, and probes of the server's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from djinn_plugins.server.kinds.metrics import MetricsFactory

__all__ = ("djinn_register_metrics",)


@hookimpl
def djinn_register_metrics(register: Callable[[MetricsFactory], None]) -> None:
    """Register the output."""
    from djinn_plugins.server.prometheus.exposition import PrometheusMetrics

    register(PrometheusMetrics())
