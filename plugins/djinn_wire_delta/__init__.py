"""Delta-encodes repeated runs: only fields that differ from a prediction are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, Connection


@hookimpl(trylast=True)
def djinn_wrap_connection(context: BackendContext) -> Callable[[Connection], Connection] | None:
    """Wrap connections before other plugins do: their wrappers see whole runs."""
    from djinn_wire_delta.connection import DeltaConnection

    return DeltaConnection
