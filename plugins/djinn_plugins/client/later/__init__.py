"""Values that come when they come: a program that only logs its losses waits for none of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, Connection, OpenBackend

__all__ = ("djinn_wrap_backend", "djinn_wrap_connection")


@hookimpl
def djinn_wrap_backend(context: BackendContext) -> Callable[[OpenBackend], OpenBackend]:
    """Fetch missing values when the session ends."""
    from djinn_plugins.client.later.backend import open_later
    from djinn_plugins.client.later.outstanding import OutstandingValues

    return lambda opens: partial(open_later, opens, context.shared(OutstandingValues))


@hookimpl
def djinn_wrap_connection(context: BackendContext) -> Callable[[Connection], Connection]:
    """Let connections bring values while the client continues."""
    from djinn_plugins.client.later.backend import wrap_connection
    from djinn_plugins.client.later.outstanding import OutstandingValues

    return partial(wrap_connection, context.shared(OutstandingValues))
