"""``djinn bench``: the speed of a server, and of the way to it, compared with PyTorch on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ("djinn_register_commands",)


@hookimpl
def djinn_register_commands(app: typer.Typer) -> None:
    """Add ``djinn bench``."""
    from djinn_plugins.cli.bench.command import bench

    app.command("bench")(bench)
