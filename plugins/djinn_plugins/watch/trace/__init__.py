"""``djinn trace``: runs a script as usual, and draws its graph and timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ("djinn_register_commands",)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add ``djinn trace``."""
    from djinn_plugins.watch.trace.command import SETTINGS, trace

    app.command("trace", context_settings=SETTINGS)(trace)
