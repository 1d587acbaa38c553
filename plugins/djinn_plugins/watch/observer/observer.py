"""Keeps the counters of sessions that have ended."""

from __future__ import annotations

from collections.abc import Mapping

from djinn_plugins.common.tracing.totals import TOTALS

__all__ = ("CoreObserver",)


class CoreObserver:
    """Adds the last counters of a session to those of the process; see `djinn.kinds.Observer`."""

    name = "core"

    def observe(self, stats: Mapping[str, int]) -> None:
        """Add the counters."""
        TOTALS.sessions.update(stats)
