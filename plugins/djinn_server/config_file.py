"""The file that ``djinn serve --config`` names: options by their names, as TOML."""

from __future__ import annotations

import inspect
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import msgspec
import typer
from typer.models import OptionInfo

from djinn.errors import ConfigurationError

__all__ = ("RELOADED", "read_config", "reread", "use_config")

RELOADED = frozenset({
    "drain_s", "max_handles", "max_host_mib", "max_inflight_mib", "max_nodes", "max_queued", "max_run_s",
    "max_sessions", "max_wait_s", "memory_mib", "tls_cert", "tls_client_ca", "tls_key", "token",
})
"""What SIGHUP reads again, by names of parameters. All else takes a restart."""
_ONLY_ON_THE_COMMAND_LINE = frozenset({"config", "with_parent"})
_FIXED = frozenset({"COMMANDLINE", "ENVIRONMENT"})
"""Where values come from that win over the file."""


def use_config(context: typer.Context, path: str, command: Callable[..., None]) -> str:
    """Have options that neither the command line nor the environment gives come from a file: for typer's callback.

    Raises:
        BadParameter: The file cannot be used.
    """
    if path and not context.resilient_parsing:
        try:
            context.default_map = read_config(Path(path), command)
        except ConfigurationError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def read_config(path: Path, command: Callable[..., None]) -> dict[str, Any]:
    """Read the file.

    Args:
        path: Where it is.
        command: A command of typer's, whose options are allowed.

    Returns:
        Values by names of parameters, each as its option would give it.

    Raises:
        ConfigurationError: It cannot be read, is no TOML, or has something in it that is no option, or no value of one.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}.") from None
    options = {option.name: option for option in _options(command)}
    if unknown := sorted(set(content) - set(options)):
        raise ConfigurationError(f"{path} has {unknown[0]!r}, which is no option that can stand there.",
                                 hint="Write options without the dashes in front of them: max-sessions = 4.")
    if "token" in content and os.name == "posix" and mode & 0o077:
        raise ConfigurationError(f"Others can read or write {path}, and it has a token.", hint=f"Run: chmod 600 {path}")
    for name, value in content.items():
        try:
            options[name].check(value)
        except (msgspec.ValidationError, ValueError) as error:
            shown = "" if name == "token" else f" = {value!r}"
            raise ConfigurationError(f"{path}: {name}{shown} cannot be: {error}.") from None
    return {options[name].parameter: value for name, value in content.items()}


def reread(
    path: str, context: typer.Context, command: Callable[..., None], values: Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Read the file again.

    Args:
        path: Where it is; empty if there is none.
        context: Of the command as it was begun.
        command: The command.
        values: Those of its parameters, by name.

    Returns:
        The values from now on, and names of options that would be others but take a restart.

    Raises:
        ConfigurationError: As `read_config`.
    """
    now, left = dict(values), []
    read = read_config(Path(path), command) if path else {}
    before = context.default_map or {}
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
    """What an option of a command can be."""

    parameter: str
    kind: Any
    default: Any
    least: float | None
    most: float | None

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return self.parameter.replace("_", "-")

    def check(self, value: Any) -> None:
        """Make sure that it can have a value.

        Raises:
            ValidationError, ValueError: It cannot.
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
