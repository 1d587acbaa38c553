"""The values of all settings, and where each comes from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from djinn.errors import ConfigurationError
from djinn.settings.core import Config
from djinn.settings.declared import Declarations, Setting, Side
from djinn.settings.privacy import remedy_of
from djinn.settings.selection import PluginSelection

__all__ = ("FILE_VARIABLE", "Settings", "Source", "selection_of", "sources_of")

FILE_VARIABLE = "DJINN_CONFIG"
"""Names a TOML file. Nothing is read that was not named: a file that happens to be in the current folder must not
choose the server that a program sends its data to."""
_ADDRESSES = frozenset({"server", "servers", "cluster"})
_T = TypeVar("_T")


@attrs.frozen
class Source:
    """Values of settings from one origin."""

    values: Mapping[str, Any] = attrs.field(repr=False)
    origin_of: Callable[[str], str]
    """Describes where the value of a setting comes from."""
    is_shared: bool = True
    """Whether sessions and servers both read it; each then takes what it has a use for."""
    exposed: str = ""
    """If it is a file that other users of this machine can read: the command that makes it private."""


class Settings:
    """The settings of a session or a server: call it with a class of settings to get the values.

    Args:
        values: Objects of classes of settings. All others have their defaults.
        origins: Where each setting comes from that is not at its default.
    """

    def __init__(self, *values: Any, origins: Mapping[str, str] | None = None) -> None:
        self._values = {type(value): value for value in values}
        self.origins = origins or {}

    def __call__(self, kind: type[_T]) -> _T:
        """Return the settings of a class."""
        value = self._values.get(kind)
        return kind() if value is None else value

    def changed(self, **given: Any) -> Settings:
        """Return the same settings with other values for some of them, by name."""
        made = [attrs.evolve(value, **{name: given[name] for name in attrs.fields_dict(kind) if name in given})
                for kind, value in self._values.items()]
        return Settings(*made, origins=self.origins)

    @classmethod
    def resolve(
        cls, declared: Declarations, sources: Sequence[Source], side: Side = "session",
        switched_off: Iterable[str] = (),
    ) -> Settings:
        """Resolve settings.

        Args:
            declared: All settings.
            sources: Values, of the lowest precedence first.
            side: Whose settings these are.
            switched_off: Plugins that are switched off. They are not imported, so their settings are unknown.

        Raises:
            ConfigurationError: A setting is unknown or has an invalid value. The error names all such settings, their
                origins and what is allowed. It repeats no secret.
        """
        known = {name: one for name, one in declared.by_name.items() if one.side in (side, "both")}
        given: dict[str, tuple[Any, Source]] = {}
        mistakes: list[tuple[str, str]] = []
        for source in sources:
            if not _ADDRESSES.isdisjoint(source.values):
                # A server that is named here takes the place of several that are named elsewhere.
                given = {name: value for name, value in given.items() if name not in _ADDRESSES}
            for name, value in source.values.items():
                if name in known:
                    given[name] = value, source
                elif name not in declared.by_name or not source.is_shared:
                    mistakes.append(_unknown(name, source, declared.by_name, ", ".join(sorted(switched_off))))
        values = {}
        for name, (value, source) in given.items():
            one, origin = known[name], source.origin_of(name)
            try:
                values[name] = one.parse(value)
            except (ValueError, TypeError):
                shown = "something that is not allowed" if one.secret else repr(value)
                mistakes.append((f"The setting {name} is {shown} ({origin})", f"{name} may be {one.allowed}."))
            if one.secret and source.exposed:
                mistakes.append((f"Others can read {origin}, which has the secret {name}", f"Run {source.exposed}."))
        if mistakes:
            told, hints = zip(*mistakes, strict=True)
            raise ConfigurationError("; ".join(told) + ".", hint=" ".join(dict.fromkeys(hints)))
        made = [kind(**{name: values[name] for name in found if name in values})
                for kind, found in declared.classes.items()]
        return cls(*made, origins={name: source.origin_of(name) for name, (_, source) in given.items()})


def sources_of(
    overrides: Mapping[str, Any], environ: Mapping[str, str], declared: Mapping[str, Setting]
) -> list[Source]:
    """List the sources of a session's settings, of the lowest precedence first: file, environment, program.

    Args:
        overrides: Values that the program gives; ``None`` means "not given" where a setting cannot be ``None``.
        environ: Environment variables; empty ones count as absent.
        declared: All settings, by name.

    Raises:
        ConfigurationError: The file cannot be used.
    """
    variables = {name: environ[one.variable] for name, one in declared.items() if environ.get(one.variable)}
    given = {name: value for name, value in overrides.items()
             if value is not None or name not in declared or declared[name].is_optional}
    made = [Source(variables, lambda name: declared[name].variable), Source(given, lambda _: "given in the program",
                                                                            is_shared=False)]
    path = environ.get(FILE_VARIABLE)
    return [_file(Path(path)), *made] if path else made


def selection_of(overrides: Mapping[str, Any], environ: Mapping[str, str]) -> PluginSelection:
    """Combine what all sources say about plugins, before any plugin is loaded."""
    core = Declarations()
    core.add(Config)
    made = PluginSelection()
    for source in sources_of(overrides, environ, core.by_name):
        made = made.merged(PluginSelection.parse(source.values.get("plugins")))
    return made


def _file(path: Path) -> Source:
    """Read a file with values by the names of options: ``recovery-budget-s = 5``."""
    import tomllib

    try:
        with path.open("rb") as file:
            exposed = remedy_of(path, os.fstat(file.fileno()))
            content = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The file of settings {path} cannot be read: {error}.",
                                 hint=f"Correct {FILE_VARIABLE} or the file.") from None
    values = {name.replace("-", "_"): value for name, value in content.items()}
    return Source(values, lambda _: str(path), exposed=exposed)


def _unknown(name: str, source: Source, declared: Mapping[str, Setting], off: str) -> tuple[str, str]:
    """Say what is wrong with a setting that does not exist here, and what to do."""
    origin = source.origin_of(name)
    if name in declared:
        return (f"The setting {name} ({origin}) is one of a {declared[name].side}",
                "Servers take theirs from the options of djinn serve, sessions from djinn.init.")
    close = difflib.get_close_matches(name, declared, 1)
    return (f"There is no setting {name!r} ({origin})",
            (f"Did you mean {close[0]}?" if close else f"Settings are {', '.join(sorted(declared))}.")
            + (f" It may be one of a plugin that is switched off: {off}." if off else ""))
