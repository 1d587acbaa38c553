"""Counts and logs what sessions do, for `djinn.metrics` and the components of the log.

Nothing runs per operation, unless the component ``interception`` shows debug messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, Connection, Observer
    from djinn.session.session import Session

__all__ = ("djinn_register_observers", "djinn_session_started", "djinn_wrap_connection")


@hookimpl
def djinn_register_observers(register: Callable[[Observer], None]) -> None:
    """Register the observer that keeps the counters of sessions that have ended."""
    from djinn_plugins.watch.observer.observer import CoreObserver

    register(CoreObserver())


@hookimpl
def djinn_wrap_connection(context: BackendContext) -> Callable[[Connection], Connection]:
    """Count messages."""
    from djinn_plugins.watch.observer.connection import CountedConnection

    return CountedConnection


@hookimpl
def djinn_session_started(session: Session) -> None:
    """Measure calls that are new to the session, and log what the settings say."""
    from djinn_plugins.watch.observer.planning import watch

    watch(session)
