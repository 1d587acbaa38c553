"""``djinn serve``: lets sessions in other processes and on other machines use an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ("djinn_register_commands",)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add ``djinn serve``."""
    from djinn_server.command import serve

    app.command("serve")(serve)
