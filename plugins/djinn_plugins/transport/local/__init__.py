"""An executor in this process, on its own thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds import Transport


@hookimpl
def djinn_register_transports(register: Callable[[Transport], None]) -> None:
    """Register the plugin's transport."""
    from djinn_plugins.transport.local.transport import LocalTransport

    register(LocalTransport())
