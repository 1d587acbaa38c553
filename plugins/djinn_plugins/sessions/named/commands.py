"""The command ``djinn attach``."""

from __future__ import annotations

import code
import runpy
import sys
from typing import Annotated

import typer

from djinn.errors import ConfigurationError, DjinnError

__all__ = ("attach",)

USAGE_ERROR = 2


def attach(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the session; djinn sessions --connect URL lists "
                                                             "them.")],
    script: Annotated[list[str] | None, typer.Argument(
        metavar="[SCRIPT [ARGUMENTS]...]", show_default=False, help="A Python file to run in it, instead of a prompt.")
    ] = None,
    connect: Annotated[str, typer.Option(
        show_default=False, metavar="URL", help="Server of the session, such as tcp://HOST:PORT. Default: "
                                                "DJINN_SERVER.",
    )] = "",
) -> None:
    """Open a session that another process has named, and a Python prompt in it, or run a file.

    ``djinn.kept`` has the values that were kept there.
    """
    import torch

    import djinn

    try:
        djinn.init(server=connect or None, name=name, name_must_exist=True)
    except DjinnError as error:
        djinn.shutdown()
        typer.echo(f"djinn: {error}", err=True)
        raise typer.Exit(USAGE_ERROR if isinstance(error, ConfigurationError) else 1) from None
    try:
        if script:
            sys.argv = list(script)
            runpy.run_path(script[0], run_name="__main__")
        else:
            code.interact(f"Session {name}: {', '.join(sorted(djinn.kept)) or 'nothing'} in djinn.kept",
                          local={"djinn": djinn, "torch": torch, "kept": djinn.kept}, exitmsg="")
    finally:
        djinn.shutdown()
