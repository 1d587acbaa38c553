"""The plugin settings of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from djinn.errors import ConfigurationError

PROTOCOLS: Mapping[str, str] = MappingProxyType({
    "interceptor": "djinn.kinds:Interceptor",
    "shapes": "djinn.kinds:ShapeInference",
    "classifier": "djinn.kinds:Classifier",
    "source": "djinn_lib_graph.kinds:GraphSource",
    "analyzer": "djinn_lib_graph.kinds:Analyzer",
    "pattern": "djinn_lib_graph.kinds:Pattern",
    "exporter": "djinn_lib_graph.kinds:Exporter",
    "scheduler": "djinn_lib_schedule.kinds:Scheduler",
    "backend": "djinn.kinds:BackendFactory",
    "cache": "djinn.kinds:CacheFactory",
    "transport": "djinn.kinds:Transport",
    "executor": "djinn.kinds:ExecutorFactory",
    "guard": "djinn.kinds:Guard",
    "observer": "djinn.kinds:Observer",
    "authenticator": "djinn_lib_server.kinds:AuthenticatorFactory",
    "admission": "djinn_lib_server.kinds:AdmissionFactory",
    "metrics": "djinn_lib_server.kinds:MetricsFactory",
})
"""The Protocol of each kind; those of libraries are imported when a plugin registers such an object."""
KINDS = tuple(PROTOCOLS)
"""The kinds of plugin."""

DEFAULTS: Mapping[str, str] = MappingProxyType({
    "interceptor": "device",
    "shapes": "meta",
    "classifier": "core",
    "source": "fx",
    "scheduler": "single",
    "backend": "fleet",
    "cache": "results",
    "executor": "torch",
    "guard": "core",
    "authenticator": "tokens",
    "admission": "fair",
})
"""Default object for each kind of which exactly one is used."""


def _freeze_names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


def _freeze(chosen: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(chosen))


@attrs.frozen
class PluginSelection:
    """Which plugins to leave out, and which objects to use."""

    disabled: frozenset[str] = attrs.field(default=frozenset(), converter=_freeze_names)
    """Names of plugins (entry points) that are not imported."""
    chosen: Mapping[str, str] = attrs.field(factory=dict, converter=_freeze)
    """For a kind: the name of the object to use."""

    @classmethod
    def parse(cls, given: str | Sequence[str] | Mapping[str, Any] | PluginSelection | None) -> PluginSelection:
        """Read a selection.

        Args:
            given: Items ``kind=name`` (use that object) and ``-plugin-name`` (do not import that plugin), as a sequence
                or as text separated by commas; or a mapping from kinds to names, in which the key ``disabled`` holds
                the names of plugins.

        Raises:
            ConfigurationError: An item is invalid; the error names it and the allowed forms.
        """
        if given is None:
            return cls()
        if isinstance(given, PluginSelection):
            return given
        disabled: set[str] = set()
        chosen: dict[str, str] = {}
        for item in _items(given):
            if item.startswith("-") and item[1:].strip():
                disabled.add(item[1:].strip())
                continue
            kind, _, name = (part.strip() for part in item.partition("="))
            if kind not in KINDS or not name:
                raise _bad_item(item)
            if chosen.setdefault(kind, name) != name:
                raise ConfigurationError(
                    f"The setting plugins chooses two objects of the kind {kind}: {chosen[kind]!r} and {name!r}.",
                    hint="Choose one of them.",
                )
        return cls(disabled, chosen)

    def merged(self, later: PluginSelection) -> PluginSelection:
        """Combine this selection with a later one, whose choices take precedence."""
        return PluginSelection(self.disabled | later.disabled, {**self.chosen, **later.chosen})


def _items(given: object) -> list[str]:
    if isinstance(given, str):
        return [item for item in re.split(r"[,\s]+", given) if item]
    if isinstance(given, Mapping):
        off = given.get("disabled", ())
        names = [off] if isinstance(off, str) else list(off)
        return [f"-{name}" for name in names] + [f"{kind}={name}" for kind, name in given.items() if kind != "disabled"]
    if isinstance(given, Sequence) and all(isinstance(item, str) for item in given):
        return [item.strip() for item in given]
    raise _bad_item(given)


def _bad_item(item: object) -> ConfigurationError:
    return ConfigurationError(
        f"The setting plugins has an item that means nothing: {item!r}.",
        hint=f"Allowed are kind=name with a kind out of {', '.join(KINDS)}, and -plugin-name, which switches a plugin "
        f"off; in DJINN_PLUGINS they are separated by commas.",
    )
