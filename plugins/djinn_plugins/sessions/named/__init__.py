"""Named sessions: ``djinn.init(name=...)`` comes back to what another process has kept; ``djinn attach`` opens one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.errors import ConfigurationError
from djinn.hookspecs import hookimpl
from djinn.settings import Config, Declarations, Settings
from djinn_plugins.common.settings.cluster import ClusterSettings
from djinn_plugins.common.settings.named import NamedSettings

if TYPE_CHECKING:
    import typer

    from djinn.session.session import Session

__all__ = ("djinn_add_settings", "djinn_check_settings", "djinn_register_commands", "djinn_session_started")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the name of a session, and how long it stays."""
    settings.add(NamedSettings)


@hookimpl
def djinn_check_settings(settings: Settings) -> None:
    """Refuse a name for a session with several servers, or with none."""
    addresses = settings(Config).addresses
    if settings(NamedSettings).name and (
            len(addresses) > 1 or not (addresses[0] or settings(ClusterSettings).cluster)):
        raise ConfigurationError("A session with a name needs one server, which keeps its values.",
                                 hint="Give the address of one as server, or that of a cluster as cluster.")


@hookimpl
def djinn_session_started(session: Session) -> None:
    """Open the session's name, if it has one."""
    settings = session.plugins.settings(NamedSettings)
    if settings.name:
        from djinn_plugins.sessions.named.kept import open_session

        open_session(session, settings.name, settings.name_lease_s, must_exist=settings.name_must_exist)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add ``djinn attach``."""
    from djinn_plugins.sessions.named.commands import attach

    app.command("attach", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(attach)
