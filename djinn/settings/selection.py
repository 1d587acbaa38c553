"""The plugin settings of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import attrs

from djinn.errors import ConfigurationError


@attrs.frozen
class Kind:
    """A kind of plugin."""

    protocol: str
    """The module and name of its Protocol; those of libraries are imported when a plugin registers such an object."""
    default: str = ""
    """Name of the object that is used if none is chosen; empty for kinds of which many are used."""


KINDS: Mapping[str, Kind] = MappingProxyType({
    "interceptor": Kind("djinn.kinds:Interceptor", "device"),
    "shapes": Kind("djinn.kinds:ShapeInference", "meta"),
    "classifier": Kind("djinn.kinds:Classifier", "core"),
    "source": Kind("djinn_plugins.graph.kinds:GraphSource", "fx"),
    "analyzer": Kind("djinn_plugins.graph.kinds:Analyzer"),
    "pattern": Kind("djinn_plugins.graph.kinds:Pattern"),
    "exporter": Kind("djinn_plugins.graph.kinds:Exporter"),
    "scheduler": Kind("djinn_plugins.schedule.kinds:GraphScheduler", "single"),
    "backend": Kind("djinn.kinds:BackendFactory", "fleet"),
    "cache": Kind("djinn.kinds:CacheFactory", "results"),
    "memory": Kind("djinn_plugins.common.kinds.memory:MemoryFactory", "tiered"),
    "transport": Kind("djinn.kinds:Transport"),
    "executor": Kind("djinn_plugins.common.kinds.executor:ExecutorFactory"),
    "guard": Kind("djinn_plugins.common.kinds.guard:Guard", "core"),
    "observer": Kind("djinn.kinds:Observer"),
    "authenticator": Kind("djinn_plugins.server.kinds.authenticator:AuthenticatorFactory", "tokens"),
    "admission": Kind("djinn_plugins.server.kinds.admission:AdmissionFactory", "fair"),
    "metrics": Kind("djinn_plugins.server.kinds.metrics:MetricsFactory"),
    "store": Kind("djinn_plugins.server.kinds.store:ModelStoreFactory", "safetensors"),
    "engine": Kind("djinn_plugins.cluster.kinds:EngineFactory", "local"),
    "mode": Kind("djinn_plugins.run.kinds:RunMode", "accelerator"),
})
"""The kinds of plugin, by name."""
DEFAULTS: Mapping[str, str] = MappingProxyType({name: kind.default for name, kind in KINDS.items() if kind.default})
"""Default object for each kind of which exactly one is used; a device decides which executor is."""
DEFAULT_EXECUTORS = ("cuda", "cpu")
"""Executors of djinn's own; if no device is given, the first that has one is used."""


@attrs.frozen
class PluginSelection:
    """Which plugins to leave out, and which objects to use."""

    disabled: AbstractSet[str] = frozenset()
    """Names of plugins (entry points) that are not imported."""
    chosen: Mapping[str, str] = attrs.field(factory=dict)
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
        if given is None or isinstance(given, PluginSelection):
            return given or cls()
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
        return cls(frozenset(disabled), MappingProxyType(chosen))

    def merged(self, later: PluginSelection) -> PluginSelection:
        """Combine this selection with a later one, whose choices take precedence."""
        return PluginSelection(self.disabled | later.disabled, MappingProxyType({**self.chosen, **later.chosen}))


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
             f"off; in DJINN_PLUGINS they are separated by commas.")
