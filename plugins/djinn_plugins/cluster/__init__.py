"""Clusters: ``djinn cluster`` starts servers with an engine, and sessions find them through a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from djinn.errors import RemoteTimeoutError, TransportError
from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

    from djinn.settings import Declarations

__all__ = ("djinn_add_settings", "djinn_register_commands", "djinn_replace_server", "djinn_resolve_server")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the settings of sessions with a cluster."""
    from djinn_plugins.common.settings.cluster import ClusterSettings

    settings.add(ClusterSettings)


@hookimpl
def djinn_resolve_server(plugins: Any) -> str | None:
    """Ask the directory of the cluster, if there is one."""
    return _resolved(plugins)


def _resolved(plugins: Any, *, is_again: bool = False) -> str | None:
    from djinn_plugins.common.settings.cluster import ClusterSettings

    settings = plugins.settings(ClusterSettings)
    if not settings.cluster:
        return None
    from djinn_plugins.cluster.resolving import resolve

    return resolve(settings, plugins.settings, is_again=is_again)


@hookimpl(tryfirst=True)
def djinn_replace_server(plugins: Any, address: str, error: Exception) -> str | None:
    """Ask the directory once more: a machine that has vanished is listed until its reports are missed."""
    if address or type(error) not in (TransportError, RemoteTimeoutError):
        return None
    return _resolved(plugins, is_again=True)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add the commands ``djinn cluster up``, ``status``, ``logs`` and ``down``."""
    import typer

    from djinn_plugins.cluster.commands import down, logs, status, up

    cluster = typer.Typer(name="cluster", no_args_is_help=True, help="Start several servers, look at them, and stop "
                                                                     "them.")
    for command in (up, status, logs, down):
        cluster.command(command.__name__)(command)
    app.add_typer(cluster)
