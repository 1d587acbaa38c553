"""Settings of plugins as options of ``djinn serve``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from djinn.plugins import Plugins
from djinn.settings import Setting

__all__ = ("environment_of", "more_options", "with_settings")


def with_settings(serve: Callable[..., None], plugins: Plugins) -> Callable[..., None]:
    """Add an option to a command for each setting of plugins that servers have.

    The command finds the values that are given in ``context.obj``, by name. They are checked when the server starts.
    """
    declared = [one for one in plugins.declared.by_name.values() if one.plugin and one.side in ("server", "both")]

    @functools.wraps(serve)
    def command(context: typer.Context, **values: Any) -> None:
        more = {one.name: values.pop(one.name) for one in declared}
        context.obj = {name: value for name, value in more.items() if value is not None}
        serve(context, **values)

    parameters = [inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(one))
                  for one in declared]
    hints = get_type_hints(serve, include_extras=True)
    usual = [each.replace(annotation=hints[each.name]) for each in inspect.signature(serve).parameters.values()]
    command.__signature__ = inspect.Signature([*usual, *parameters])  # type: ignore[attr-defined]  # of any function
    command.__annotations__ = hints | {each.name: each.annotation for each in parameters}
    return command


def _option(one: Setting) -> Any:
    default = "" if one.secret else f" [default: {one.default}]"
    return Annotated[str | None, typer.Option(
        f"--{one.option}", envvar=one.variable, metavar="VALUE", show_default=False,
        rich_help_panel=f"Settings of {one.plugin}", help=f"{one.help}; {one.allowed}.{default}")]


def more_options(context: typer.Context, command: Callable[..., None]) -> list[str]:
    """List the names of the options that `with_settings` has added to a command."""
    own = {*inspect.signature(command).parameters, "help"}
    return [str(each.name).replace("_", "-") for each in context.command.params if each.name not in own]


def environment_of(plugins: Plugins) -> dict[str, str]:
    """Return environment variables that give a worker the settings of plugins. Workers are given no secrets."""
    made = {}
    for kind, declared in plugins.declared.classes.items():
        values: object = plugins.settings(kind)
        for name, one in declared.items():
            value = getattr(values, name)
            if one.plugin and name in plugins.settings.origins and not one.secret and value is not None:
                made[one.variable] = ",".join(value) if isinstance(value, tuple) else str(value)
    return made
