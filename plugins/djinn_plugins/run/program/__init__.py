"""``djinn run``: runs programs that do not mention djinn on the remote device, and does the same in notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import typer

    from djinn.plugins import Plugins
    from djinn.settings import Declarations

__all__ = ("djinn_add_settings", "djinn_examine_system", "djinn_register_commands", "djinn_session_closed",
           "djinn_session_started")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare which processes load djinn with PyTorch, and in which mode."""
    from djinn_plugins.run.program.settings import RunSettings

    settings.add(RunSettings)


@hookimpl
def djinn_register_commands(app: typer.Typer, plugins: Plugins) -> None:
    """Add ``djinn run``."""
    from djinn_plugins.run.program.command import SETTINGS, modes_of, run

    app.command("run", context_settings=SETTINGS, epilog=modes_of(plugins))(run)


@hookimpl
def djinn_session_started(session: Any) -> None:
    """Note where the session's operations run."""
    from djinn_plugins.run.running import session_started

    session_started(session)


@hookimpl
def djinn_session_closed(stats: Mapping[str, int]) -> None:
    """Note what the session has done."""
    from djinn_plugins.run.running import session_ended

    session_ended(stats)


@hookimpl
def djinn_examine_system(report: Callable[[str, str, str], None]) -> None:
    """Report whether ``import torch`` loads djinn, and which run modes there are."""
    from djinn_plugins.run.program.examining import autoloading, modes

    report("import torch", *autoloading())
    report("modes of djinn run", *modes())
