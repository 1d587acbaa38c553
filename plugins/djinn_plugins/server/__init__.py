"""Serves an executor to sessions in other processes and on other machines.

Provides ``djinn serve`` and the operator's commands ``djinn sessions`` and ``djinn kick``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from djinn.plugins import Plugins

__all__ = ("djinn_examine_system", "djinn_register_commands")


@hookimpl
def djinn_register_commands(app: typer.Typer, plugins: Plugins) -> None:
    """Add ``djinn serve`` and the operator's commands ``djinn sessions`` and ``djinn kick``."""
    from djinn_plugins.server.command import serve
    from djinn_plugins.server.operator_command import kick, list_sessions
    from djinn_plugins.server.plugin_settings import with_settings

    app.command("serve")(with_settings(serve, plugins))
    app.command("sessions")(list_sessions)
    app.command("kick")(kick)


@hookimpl
def djinn_examine_system(report: Callable[[str, str, str], None]) -> None:
    """Report which parts of the workers' sandbox this system supports."""
    from djinn_plugins.server.sandbox.fence import examine

    for part in examine():
        name = f"sandbox of servers: {part.name}"
        if part.missing:
            report(name, f"not here: {part.missing}",
                   f"Without it, a worker that is taken over can {part.consequence}.")
        else:
            report(name, "here", "")
