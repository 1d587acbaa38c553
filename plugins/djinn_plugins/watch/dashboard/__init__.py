"""A page that shows a server's tenants and sessions live: ``djinn serve --dashboard-port``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from djinn_plugins.server.kinds.metrics import MetricsFactory

__all__ = ("djinn_register_metrics",)


@hookimpl
def djinn_register_metrics(register: Callable[[MetricsFactory], None]) -> None:
    """Register the page as an output of metrics."""
    from djinn_plugins.watch.dashboard.output import Dashboards

    register(Dashboards())
