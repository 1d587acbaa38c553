"""Recovery: a session survives the death of its server.

A `djinn_plugins.replay.recovering.Recovering` wraps the session's backend. It keeps a journal of how every value that
the program can still use came to be. When a server dies, it makes the same values again on another one and repeats the
request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from djinn.errors import ConfigurationError, RemoteTimeoutError, TransportError
from djinn.hookspecs import hookimpl
from djinn.settings import Config, Declarations, Settings
from djinn_plugins.common.settings.named import NamedSettings
from djinn_plugins.replay.settings import RecoverySettings

if TYPE_CHECKING:
    from djinn.kinds import BackendContext, OpenBackend


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the settings of recovery."""
    settings.add(RecoverySettings)


@hookimpl
def djinn_check_settings(settings: Settings) -> None:
    """Refuse recovery for a session with a name."""
    if settings(NamedSettings).name and settings(RecoverySettings).is_on(settings(Config).addresses):
        raise ConfigurationError("A session with a name cannot be recovered: what another process has kept cannot be "
                                 "computed again.", hint="Leave out either name or recovery and local_fallback.")


@hookimpl
def djinn_wrap_backend(context: BackendContext) -> Callable[[OpenBackend], OpenBackend] | None:
    """Wrap the backend if the settings ask for recovery."""
    if not context.settings(RecoverySettings).is_on(context.settings(Config).addresses):
        return None
    from djinn_plugins.replay.factory import open_recovering

    return lambda opens: partial(open_recovering, opens, context)


@hookimpl
def djinn_replace_server(plugins: Any, address: str, error: Exception) -> str | None:
    """Name another server of the session, or this process if the settings allow it; a refusal is no reason."""
    settings, addresses = plugins.settings(RecoverySettings), plugins.settings(Config).addresses
    if not settings.is_on(addresses) or type(error) not in (TransportError, RemoteTimeoutError):
        return None
    from djinn.session.connecting import connect
    from djinn_plugins.replay.reconnecting import HERE, find_another, log

    if len(addresses) > 1:
        return find_another(addresses, address, partial(connect, plugins))
    if not settings.local_fallback:
        return None
    log.warning("%s cannot be reached: operations run in this process. %s", address, error)
    return HERE
