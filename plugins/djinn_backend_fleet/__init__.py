"""The backend of sessions with several executors.

A `djinn_backend_fleet.fleet.Fleet` has one `djinn.session.single_backend.SingleBackend` for each executor. It keeps a
directory of where values are, lets a placement decide where operations run, and sends values that are needed elsewhere
from server to server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.errors import ConfigurationError
from djinn.hookspecs import hookimpl
from djinn.settings import Config

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, BackendFactory


@hookimpl
def djinn_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Register the plugin's one backend."""
    from djinn_backend_fleet.factory import FleetFactory

    register(FleetFactory())


@hookimpl
def djinn_wrap_backend(context: BackendContext) -> None:
    """Refuse the placement ``phases`` for a session with one server. No backend is wrapped."""
    settings = context.settings(Config)
    if settings.placement == "phases" and len(settings.addresses) < 2:
        raise ConfigurationError(
            "placement='phases' reads prompts on other servers than the first, and there is only one.",
            hint="Name several: djinn.init(servers=['tcp://first:7070', 'tcp://second:7070'], placement='phases').")
