"""The TOML file of ``djinn serve --config``, which sets options by name."""

from __future__ import annotations

import inspect
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import msgspec
import typer
from typer.models import OptionInfo

from djinn.errors import ConfigurationError
from djinn.settings.privacy import remedy_of
from djinn_plugins.server.options import declared
from djinn_plugins.server.plugin_settings import more_options

__all__ = ("RELOADED", "read_config", "reread", "use_config")

RELOADED = frozenset(each.option.parameter for each in declared() if each.option.reloads)
"""Parameters that SIGHUP reads again. Changing others needs a restart."""
_ONLY_ON_THE_COMMAND_LINE = frozenset({"config", "with_parent"})
_FIXED = frozenset({"COMMANDLINE", "ENVIRONMENT"})
"""Sources of values that override the file."""


def use_config(context: typer.Context, path: str, command: Callable[..., None]) -> str:
    """Typer callback: take options from a file unless the command line or the environment sets them.

    Raises:
        BadParameter: The file cannot be used.
    """
    if path and not context.resilient_parsing:
        try:
            context.default_map = read_config(Path(path), command, more_options(context, command))
        except ConfigurationError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def read_config(path: Path, command: Callable[..., None], others: Sequence[str] = ()) -> dict[str, Any]:
    """Read the file.

    Args:
        path: Its path.
        command: The typer command whose options are allowed.
        others: Names of more options, whose values are checked later.

    Returns:
        Values by parameter name, as the options would give them.

    Raises:
        ConfigurationError: The file cannot be read, is no TOML, or has an unknown option or an invalid value.
    """
    try:
        with path.open("rb") as file:
            remedy = remedy_of(path, os.fstat(file.fileno()))
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}.") from None
    options = {option.name: option for option in _options(command)}
    if unknown := sorted(set(content) - set(options) - set(others)):
        raise ConfigurationError(f"{path} has {unknown[0]!r}, which is no option that can stand there.",
                                 hint="Write options without the dashes in front of them: max-sessions = 4.")
    if "token" in content and remedy:
        raise ConfigurationError(f"Others can read or write {path}, and it has a token.", hint=f"Run: {remedy}")
    for name, value in content.items():
        if name in others:
            continue
        try:
            options[name].check(value)
        except (msgspec.ValidationError, ValueError) as error:
            shown = "" if name == "token" else f" = {value!r}"
            raise ConfigurationError(f"{path}: {name}{shown} cannot be: {error}.") from None
    return {name.replace("-", "_"): _text(value) if name in others else value for name, value in content.items()}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def reread(
    path: str, context: typer.Context, command: Callable[..., None], values: Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Read the file again.

    Args:
        path: Its path; empty if there is none.
        context: The context that the command was started with.
        command: The command.
        values: The values of its parameters, by name.

    Returns:
        The new values, and the names of changed options that need a restart.

    Raises:
        ConfigurationError: As `read_config`.
    """
    now, left = dict(values), []
    others = more_options(context, command)
    read = read_config(Path(path), command, others) if path else {}
    before = context.default_map or {}
    left += [name for name in others if read.get(name.replace("-", "_")) != before.get(name.replace("-", "_"))]
    for option in _options(command) if path else ():
        source = context.get_parameter_source(option.parameter)
        if source is not None and source.name in _FIXED:
            continue
        value = read.get(option.parameter, option.default)
        if option.parameter in RELOADED:
            now[option.parameter] = value
        elif value != before.get(option.parameter, option.default):
            left.append(option.name)
    return now, left


@attrs.frozen
class _Option:
    """The name, type, default and range of a command's option."""

    parameter: str
    kind: Any
    default: Any
    least: float | None
    most: float | None

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.parameter.replace("_", "-")

    def check(self, value: Any) -> None:
        """Check a value of the option.

        Raises:
            ValidationError, ValueError: The value is invalid.
        """
        msgspec.convert(value, self.kind)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("it is no finite number")
        if self.least is not None and value < self.least:
            raise ValueError(f"it is less than {self.least:g}")
        if self.most is not None and value > self.most:
            raise ValueError(f"it is more than {self.most:g}")


def _options(command: Callable[..., None]) -> list[_Option]:
    parameters = inspect.signature(command).parameters
    found = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        about = [extra for extra in get_args(hint)[1:] if isinstance(extra, OptionInfo)]
        if about and name not in _ONLY_ON_THE_COMMAND_LINE:
            found.append(_Option(name, get_args(hint)[0], parameters[name].default, about[0].min, about[0].max))
    return found
