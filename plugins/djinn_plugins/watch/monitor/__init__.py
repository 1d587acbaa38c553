"""``djinn status``, ``djinn top`` and ``djinn models``: the state of a server, and the models that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ("djinn_register_commands",)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add ``djinn status``, ``djinn top`` and ``djinn models``."""
    from djinn_plugins.watch.monitor.models_command import models
    from djinn_plugins.watch.monitor.status_command import status
    from djinn_plugins.watch.monitor.top_command import top

    app.command("status")(status)
    app.command("top")(top)
    app.command("models")(models)
