"""Delta-encodes repeated runs: only fields that differ from a prediction are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, Connection


@hookimpl
def djinn_wrap_connection(context: BackendContext) -> Callable[[Connection], Connection] | None:
    """Shorten what connections send."""
    from djinn_plugins.client.delta_encoding.connection import DeltaConnection

    return DeltaConnection
