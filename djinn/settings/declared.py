"""Declaring settings: an attrs class, whose fields are the settings of one plugin or of the kernel."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args, get_origin

import attrs

from djinn.errors import PluginValidationError

__all__ = ("Declarations", "Setting", "Side", "setting")

Side: TypeAlias = Literal["session", "server", "both"]
"""Where a setting has a meaning: in a client's session, in a server, or in both."""
_DETAILS = "djinn"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_UNITS = {"_s": " of seconds", "_bytes": " of bytes"}
_KINDS: Mapping[Any, str] = {
    bool: f"one of True, False, {', '.join(_TRUE + _FALSE)}", int: "a whole number", float: "a number", str: "text",
    tuple: "a list of texts, or texts separated by commas", type(None): "None",
}


def setting(
    default: Any, *, help: str, minimum: float = -math.inf, above: float = -math.inf,  # noqa: A002  # as argparse does
    secret: bool = False, reads: Callable[[Any], Any] | None = None, allowed: str = "",
) -> Any:
    """Declare a field of an attrs class as a setting. The annotation of the field is the setting's type.

    Args:
        default: Its value if it is not set.
        help: One sentence about it.
        minimum: The least number that is allowed.
        above: Numbers must be greater than this one.
        secret: Whether its value must not be shown.
        reads: Converts a value, and raises a `ValueError` if it is not allowed. Without it, the type decides.
        allowed: Describes the values that ``reads`` accepts.
    """
    return attrs.field(default=default, repr=not secret,
                       metadata={_DETAILS: Setting("", None, default, help, minimum, above, secret, reads, allowed)})


@attrs.frozen
class Setting:
    """One setting; see `setting`."""

    name: str
    type: Any
    default: Any
    help: str
    minimum: float
    above: float
    secret: bool
    reads: Callable[[Any], Any] | None
    allowed_by_reads: str
    plugin: str = ""
    """The plugin that declares it; empty for the kernel."""
    side: Side = "session"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"DJINN_{self.name.upper()}"

    @property
    def option(self) -> str:
        """Its name in files and on command lines."""
        return self.name.replace("_", "-")

    @property
    def is_optional(self) -> bool:
        """Whether ``None`` is a value of it."""
        return type(None) in get_args(self.type)

    @property
    def allowed(self) -> str:
        """Describes the values that are allowed; empty if djinn cannot read the type from text."""
        if self.allowed_by_reads:
            return self.allowed_by_reads
        if get_origin(self.type) is Literal:
            return f"one of {', '.join(get_args(self.type))}"
        kinds = get_args(self.type) if self.is_optional else (get_origin(self.type) or self.type,)
        bounds = [f" {word} {bound:g}" for word, bound in (("from", self.minimum), ("above", self.above))
                  if bound > -math.inf]
        if any(kind not in _KINDS for kind in kinds):
            return ""
        unit = next((unit for suffix, unit in _UNITS.items() if self.name.endswith(suffix)), "")
        return ", or ".join(_KINDS[kind] + ("" if kind is type(None) else unit + "".join(bounds)) for kind in kinds)

    def parse(self, value: Any) -> Any:
        """Convert a value from any source.

        Raises:
            ValueError, TypeError: The value is not allowed.
        """
        made = self.reads(value) if self.reads else _converter().structure(value, self.type)
        if isinstance(made, (int, float)) and not (self.minimum <= made < math.inf and made > self.above):
            raise ValueError
        return made


@functools.cache
def _converter() -> Any:
    # Imported late: `import djinn` resolves no settings, and must stay fast.
    import cattrs

    made: Any = cattrs.Converter()
    for kind, read in ((bool, _flag), (int, _whole), (float, _number), (str, _text)):
        made.register_structure_hook(kind, read)
    for origin, read_any in ((tuple, _texts), (Literal, _one_of)):
        made.register_structure_hook_func(functools.partial(_is_made_of, origin), read_any)
    return made


def _is_made_of(origin: Any, kind: Any) -> bool:
    return get_origin(kind) is origin


def _flag(value: Any, _: Any) -> bool:
    text = str(value).strip().lower()
    if isinstance(value, (bool, str)) and text in _TRUE + _FALSE:
        return text in _TRUE
    raise ValueError


def _one_of(value: Any, kind: Any) -> Any:
    if value not in get_args(kind):
        raise ValueError
    return value


def _whole(value: Any, _: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return int(value)


def _number(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError
    return float(value)


def _text(value: Any, _: Any = str) -> str:
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError
    return text


def _texts(value: Any, _: Any) -> tuple[str, ...]:
    return tuple(_text(item).strip() for item in (value.split(",") if isinstance(value, str) else value))


class Declarations:
    """All declared settings, as the hook `djinn.hookspecs.djinn_add_settings` receives them.

    Attributes:
        classes: The settings of each class, by name.
        by_name: All settings.
    """

    def __init__(self) -> None:
        self.classes: dict[type, dict[str, Setting]] = {}
        self.by_name: dict[str, Setting] = {}
        self._plugin = ""

    def of(self, plugin: str) -> Declarations:
        """Note which plugin the next settings belong to."""
        self._plugin = plugin
        return self

    def add(self, kind: type, side: Side = "session") -> None:
        """Declare the settings of a class.

        Args:
            kind: An attrs class; each of its fields is a `setting`.
            side: Where they have a meaning.

        Raises:
            PluginValidationError: A field is no setting, or there is a setting of that name.
        """
        if kind in self.classes:
            # Plugins of the same kind may share settings.
            return
        found: dict[str, Setting] = {}
        for field in attrs.fields(attrs.resolve_types(kind)):
            details, other = field.metadata.get(_DETAILS), self.by_name.get(field.name)
            if details is None:
                raise PluginValidationError(
                    f"{kind.__qualname__}.{field.name} of the plugin {self._plugin!r} is no setting.",
                    hint="Write djinn.settings.setting(DEFAULT, help=...) after the annotation.")
            if other is not None:
                raise PluginValidationError(
                    f"The plugins {other.plugin!r} and {self._plugin!r} both have a setting {field.name!r}.",
                    hint="Rename one, for example by putting the name of the plugin in front of it.")
            made = attrs.evolve(details, name=field.name, type=field.type, plugin=self._plugin, side=side)
            if not made.allowed:
                raise PluginValidationError(
                    f"The setting {field.name!r} of the plugin {self._plugin!r} has the type {made.type}.",
                    hint="Say how values of that type are read, setting(..., reads=..., allowed=...).")
            found[field.name] = made
        self.classes[kind] = found
        self.by_name |= found

    def remove(self, plugin: str) -> None:
        """Remove the settings of a plugin that does not work."""
        self.by_name = {name: one for name, one in self.by_name.items() if one.plugin != plugin}
        self.classes = {kind: found for kind, found in self.classes.items() if found.keys() <= self.by_name.keys()}
