"""Run modes in notebooks: ``%load_ext djinn``, and the line magic ``%djinn``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from djinn.errors import ConfigurationError
from djinn.plugins import Plugins
from djinn.session import runtime
from djinn_plugins.run.running import RUN_AS, ActiveRun, begin, choose, leave

__all__ = ("load_ipython_extension", "unload_ipython_extension")

MAGIC = "djinn"


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigurationError(f"%{MAGIC}: {message}.", hint=self.format_usage().strip())


def load_ipython_extension(ipython: Any) -> None:
    """Enter the mode that the environment names, or the default, and add the line magic ``%djinn``."""
    _enter("")
    ipython.register_magic_function(djinn, "line", MAGIC)


def unload_ipython_extension(ipython: Any) -> None:
    """Leave the mode, and remove the magic. The session continues."""
    leave()
    ipython.magics_manager.magics["line"].pop(MAGIC, None)


def djinn(line: str) -> None:
    """Choose the server and the mode, and say what ran where: ``%djinn [--server URL] [--as MODE]``.

    Raises:
        ConfigurationError: The line has other arguments, or a setting is invalid.
        PluginError: There is no such mode.
        TransportError: The server cannot be reached, or refuses the connection.
    """
    parser = _Arguments(prog=f"%{MAGIC}", add_help=False)
    parser.add_argument("--server", metavar="URL")
    parser.add_argument("--as", dest="mode", metavar="MODE", default="")
    given = parser.parse_args(shlex.split(line))
    run = _enter(given.mode)
    if given.server is not None:
        runtime.init(given.server)
        os.environ["DJINN_SERVER"] = given.server
    running = runtime.current().stats() if runtime.is_initialized() else {}
    sys.stdout.write(f"{run.mode.name}: {run.report.summary(running)}\n")


def _enter(mode: str) -> ActiveRun:
    return begin(choose(Plugins.configured({}, os.environ), mode or os.environ.get(RUN_AS, "")))
