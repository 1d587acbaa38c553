"""Starts a session and enters a mode, before a program or a notebook begins."""

from __future__ import annotations

from collections.abc import Mapping

from djinn.plugins import Plugins
from djinn.session import runtime
from djinn_plugins.run.program.settings import RunSettings
from djinn_plugins.run.running import ActiveRun, begin, choose

__all__ = ("start",)


def start(environ: Mapping[str, str], mode: str = "", *, strict: bool = False) -> ActiveRun:
    """Connect to the server that the environment names, and enter a mode for the rest of the process.

    Args:
        environ: Environment variables.
        mode: The mode; empty for that of the environment, or the default.
        strict: Whether problems make the run fail.

    Raises:
        ConfigurationError: A setting is unknown or has an invalid value.
        PluginError: The mode, or another plugin, is missing, broken or ambiguous.
        TransportError: The server cannot be reached, or refuses the connection.
    """
    plugins = Plugins.configured({}, environ)
    chosen = choose(plugins, mode or plugins.settings(RunSettings).run_as)
    run = begin(chosen, strict=strict, is_program=True)
    try:
        runtime.init()
    except BaseException:
        run.cancel()
        raise
    return run
