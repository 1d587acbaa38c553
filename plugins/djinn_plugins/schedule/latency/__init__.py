"""The schedule with the shortest completion time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.schedule.kinds import GraphScheduler


@hookimpl
def djinn_register_schedulers(register: Callable[[GraphScheduler], None]) -> None:
    """Register the plugin's scheduler."""
    from djinn_plugins.schedule.latency.scheduler import LatencyScheduler

    register(LatencyScheduler())
