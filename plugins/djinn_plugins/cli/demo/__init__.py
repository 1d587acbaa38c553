"""``djinn demo``: real work on the remote accelerator, compared with the same work here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add the command ``demo``."""
    from djinn_plugins.cli.demo.command import demo

    app.command()(demo)
