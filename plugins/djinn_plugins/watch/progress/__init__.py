"""Shows what a session waits for, once that takes longer than a second: uploads, downloads, results, servers.

Only where a user sees it: standard error is a terminal, or the program runs in a notebook. Nothing runs per
operation: a thread looks at the connections ten times a second while they are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl
from djinn.settings import Declarations
from djinn_plugins.watch.progress.settings import ProgressSettings

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, Connection, Observer

__all__ = ("djinn_add_settings", "djinn_register_observers", "djinn_wrap_connection")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare whether progress is shown."""
    settings.add(ProgressSettings)


@hookimpl
def djinn_register_observers(register: Callable[[Observer], None]) -> None:
    """Register what shows the waits before there is a connection; it has the settings before that."""
    from djinn_plugins.watch.progress.observer import ProgressObserver

    register(ProgressObserver())


@hookimpl
def djinn_wrap_connection(context: BackendContext) -> Callable[[Connection], Connection] | None:
    """Show what connections wait for, on a terminal or in a notebook."""
    if not context.settings(ProgressSettings).progress:
        return None
    from djinn_plugins.watch.progress.connection import watched

    return watched()
