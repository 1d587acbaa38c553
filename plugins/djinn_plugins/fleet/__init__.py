"""The backend of sessions with several executors.

A `djinn_plugins.fleet.fleet.Fleet` has one `djinn.session.single_backend.SingleBackend` for each executor. It keeps a
directory of where values are, lets a placement decide where operations run, and sends values that are needed elsewhere
from server to server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl
from djinn.settings import Declarations, Settings
from djinn_plugins.common.settings.placement import PlacementSettings

if TYPE_CHECKING:
    from djinn.kinds import BackendFactory


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the setting of placements."""
    settings.add(PlacementSettings)


@hookimpl
def djinn_check_settings(settings: Settings) -> None:
    """Refuse settings that need another number of servers."""
    from djinn_plugins.fleet.checking import check

    check(settings)


@hookimpl
def djinn_register_backends(register: Callable[[BackendFactory], None]) -> None:
    """Register the plugin's one backend."""
    from djinn_plugins.fleet.factory import FleetFactory

    register(FleetFactory())
