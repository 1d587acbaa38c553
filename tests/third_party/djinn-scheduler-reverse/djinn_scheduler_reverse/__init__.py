"""A scheduler whose order is as far from program order as the graph allows.

Whoever relies on program order where the graph does not promise it is found out by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn_plugins.schedule.kinds import GraphScheduler


@hookimpl
def djinn_register_schedulers(register: Callable[[GraphScheduler], None]) -> None:
    """Register the scheduler ``reverse``."""
    from djinn_scheduler_reverse.scheduler import ReverseScheduler

    register(ReverseScheduler())
