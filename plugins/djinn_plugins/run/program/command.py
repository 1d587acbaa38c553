"""The command ``djinn run``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from djinn.plugins import Plugins

__all__ = ("SETTINGS", "modes_of", "run")

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Arguments after the program's name belong to the program."""


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(
        metavar="SCRIPT", show_default=False,
        help="Python file, folder or archive to run, `-` for standard input, or with -m the name of a module; followed "
             "by its own arguments.")],
    server: Annotated[str, typer.Option(
        show_default=False, help="Server to use, tcp://HOST:PORT. Without it: DJINN_SERVER, or this process.")] = "",
    mode: Annotated[str, typer.Option(
        "--as", metavar="MODE", show_default=False, help="What the device is for the program; see below.")] = "",
    strict: Annotated[bool, typer.Option(
        "--strict", help="Fail if the program has not used the device, and on other problems of the report.")] = False,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Run a program that does not mention djinn on the remote device.

    The program runs as with `python SCRIPT`. At the end, one line on standard error says what ran where.
    """
    from djinn_plugins.run.program.starting import start
    from djinn_plugins.run.script import Script

    given = Script(script, tuple(context.args), is_module)
    given.check()
    if server:
        os.environ["DJINN_SERVER"] = server
        for other in ("DJINN_SERVERS", "DJINN_CLUSTER"):
            os.environ.pop(other, None)
    started = start(os.environ, mode, strict=strict)
    try:
        started.status = given.run()
    except SystemExit as leaving:
        started.status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    raise typer.Exit(max(started.status, 0))


def modes_of(plugins: Plugins) -> str:
    """List the modes of all plugins, for the help text."""
    modes = sorted(plugins.registered("mode").items())
    return "Modes: " + "; ".join(f"{name}, {entries[0].value.help}" for name, entries in modes) + "."
