"""The command ``djinn settings``."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from djinn.plugins.manager import Plugins

__all__ = ("SettingRow", "settings_of")


@attrs.frozen
class SettingRow:
    """One setting."""

    name: str
    value: str
    """Its value here; of a secret, only whether it is set."""
    origin: str
    """Where the value comes from; empty for the default."""
    variable: str
    plugin: str
    """The plugin that declares it; empty for the kernel."""
    side: str
    """Whether it belongs to a session, a server or both."""
    allowed: str
    help: str


def settings_of(plugins: Plugins) -> Iterator[SettingRow]:
    """List all settings of plugins, and their values."""
    for kind, declared in plugins.declared.classes.items():
        values: object = plugins.settings(kind)
        for name, one in declared.items():
            value = getattr(values, name)
            shown = ("set" if value else "not set") if one.secret else str(value)
            yield SettingRow(name, shown, plugins.settings.origins.get(name, ""), one.variable, one.plugin, one.side,
                             one.allowed, one.help)
