"""Commands that plugins add to the program ``djinn``."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import typer
from typer.main import get_command_name, solve_typer_info_defaults

from djinn.errors import PluginError, PluginValidationError
from djinn.plugins.checks import remedy
from djinn.plugins.manager import Plugins, Registered

__all__ = ("add_commands", "import_djinn_first", "reflow")

_QUICK = frozenset({"settings", "sessions", "kick", "top", "serve", "directory", *(
    f"{group} {command}" for group, commands in (
        ("token", ("create", "rotate", "revoke", "list")), ("cluster", ("up", "status", "logs", "down")))
    for command in commands)})
"""Commands of djinn's own that do without PyTorch, or say something before they import it."""


def add_commands(plugins: Plugins, app: typer.Typer, problems: list[PluginError]) -> list[Registered]:
    """Let all plugins add their commands to the program; return these.

    Args:
        plugins: The plugins.
        app: The program.
        problems: Receives the errors of single plugins, whose commands are then left out.
    """
    found: list[Registered] = []
    for name in sorted(plugins.distributions):
        try:
            add = partial(plugins.call_alone, name, "djinn_register_commands", app=app, plugins=plugins)
            added = _add_checked(app, add, plugins.owner(name), name)
        except PluginError as error:
            problems.append(error)
        else:
            found += [Registered("command", command, name, plugins.distributions[name], None) for command in added]
    return found


def _add_checked(app: typer.Typer, add: Callable[[], None], owner: str, name: str) -> list[str]:
    """Let a plugin add commands, and take them back if anything is wrong with them.

    Args:
        app: The program.
        add: Calls the plugin.
        owner: The plugin in words, for the message.
        name: Name of the plugin's entry point.

    Returns:
        Names of the added commands.

    Raises:
        PluginValidationError: A command of that name exists already.
    """
    commands, groups = len(app.registered_commands), len(app.registered_groups)
    before = _command_names(app.registered_commands, app.registered_groups)
    try:
        add()
        added = _command_names(app.registered_commands[commands:], app.registered_groups[groups:])
        twice = sorted(command for command in set(added) if (before + added).count(command) > 1)
        if twice:
            raise PluginValidationError(f"{owner} adds a command that exists already: {', '.join(twice)}.",
                                        hint=remedy(name))
    except Exception:
        del app.registered_commands[commands:], app.registered_groups[groups:]
        raise
    return added


def import_djinn_first(app: typer.Typer, group_name: str = "") -> None:
    """Let each command import the package ``djinn``, and PyTorch with it, before it runs.

    Args:
        app: The program, or a group of its commands.
        group_name: The words before the names of its commands.
    """
    for command in app.registered_commands:
        if command.callback is not None and f"{group_name} {command.name or ''}".strip() not in _QUICK:
            command.callback = _after_import(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            own_name = solve_typer_info_defaults(group).name or ""
            import_djinn_first(group.typer_instance, f"{group_name} {own_name}".strip())


def _after_import(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def run(*args: Any, **kwargs: Any) -> Any:
        import djinn

        # Modules of it that are imported before the package itself would import each other in a circle.
        assert djinn.__version__
        return callback(*args, **kwargs)

    return run


def reflow(app: typer.Typer) -> None:
    """Give each command a help text of one line per paragraph, which a terminal of any width breaks well."""
    for command in app.registered_commands:
        text = inspect.cleandoc(command.help or inspect.getdoc(command.callback) or "")
        command.help = "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            reflow(group.typer_instance)


def _command_names(commands: Sequence[Any], groups: Sequence[Any]) -> list[str]:
    names = [command.name or get_command_name(command.callback.__name__) for command in commands]
    for group in groups:
        name = solve_typer_info_defaults(group).name
        inner = group.typer_instance
        names += [name] if name else _command_names(inner.registered_commands, inner.registered_groups)
    return names
