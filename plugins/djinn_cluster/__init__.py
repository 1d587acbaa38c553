"""``djinn cluster``: starts several servers with an engine, shows their state and logs, and stops them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ("djinn_register_commands",)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add the commands ``djinn cluster up``, ``status``, ``logs`` and ``down``."""
    import typer

    from djinn_cluster.commands import down, logs, status, up

    cluster = typer.Typer(name="cluster", no_args_is_help=True, help="Start several servers, look at them, and stop "
                                                                     "them.")
    for command in (up, status, logs, down):
        cluster.command(command.__name__)(command)
    app.add_typer(cluster)
