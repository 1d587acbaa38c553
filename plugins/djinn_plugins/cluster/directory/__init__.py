"""The directory of a cluster: ``djinn directory``, and what lists a server in one, ``djinn serve --directory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from djinn_plugins.server.kinds.metrics import MetricsFactory

__all__ = ("djinn_register_commands", "djinn_register_metrics")


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add the command ``djinn directory``."""
    from djinn_plugins.cluster.directory.command import directory

    app.command("directory")(directory)


@hookimpl
def djinn_register_metrics(register: Callable[[MetricsFactory], None]) -> None:
    """Register the output of metrics that keeps a directory informed."""
    from djinn_plugins.cluster.directory.announcing import Announcements

    register(Announcements())
