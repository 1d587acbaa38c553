"""Lists the objects that plugins register, and which of them a session would use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from djinn.errors import ConfigurationError, PluginError
from djinn.plugins import DEFAULTS, KINDS, Plugins, Registered
from djinn.settings.selection import DEFAULT_EXECUTORS

if TYPE_CHECKING:
    from djinn_plugins.common.kinds.executor import ExecutorFactory

__all__ = ("PluginRow", "executors", "rows_of", "why_without_devices")


@attrs.frozen
class PluginRow:
    """One object."""

    kind: str
    name: str
    active: bool
    """Whether a session would use it."""
    plugin: str
    distribution: str
    replaced: str = ""
    """Plugin that would do its work if the configuration said nothing."""
    note: str = ""
    """Why it is not active, where that is not a matter of choice."""


def rows_of(plugins: Plugins, commands: Iterable[Registered] = ()) -> list[PluginRow]:
    """List the objects of all plugins: whether a session would use each, its distribution, and the plugin it replaces.

    Args:
        plugins: The plugins.
        commands: Commands of the program that they have added.
    """
    rows = [_row(plugins, entry) for kind in KINDS for entries in plugins.registered(kind).values()
            for entry in entries]
    rows += [PluginRow(entry.kind, entry.name, True, entry.plugin, entry.distribution) for entry in commands]
    for hook in ("djinn_session_started", "djinn_session_closed"):
        for implementation in getattr(plugins.hook, hook).get_hookimpls():
            plugin = implementation.plugin_name
            rows.append(PluginRow("hook", hook, True, plugin, plugins.distributions[plugin]))
    rows += [PluginRow(_kind_of(name), "", False, name, distribution, note="switched off")
             for name, distribution in sorted(plugins.disabled.items())]
    return rows


def executors(plugins: Plugins) -> list[Registered]:
    """List the executors of all plugins, by name."""
    return [entry for _, entries in sorted(plugins.registered("executor").items()) for entry in entries]


def why_without_devices(factory: ExecutorFactory) -> str:
    """Say why an executor has no device here; empty if it has one."""
    if factory.devices():
        return ""
    try:
        factory.open("").close()
    except ConfigurationError as error:
        return error.summary
    return ""


def _row(plugins: Plugins, entry: Registered) -> PluginRow:
    active, note = False, ""
    try:
        if entry.kind == "transport":
            active = plugins.find_transport(entry.value.scheme) is entry
        elif entry.kind == "executor":
            active = plugins.find_executor("") is entry
            note = why_without_devices(entry.value)
        elif entry.kind in DEFAULTS:
            active = plugins.find(entry.kind, DEFAULTS[entry.kind]) is entry
        else:
            active = entry in plugins.find_all(entry.kind)
    except PluginError as error:
        note = error.summary
    replaced = _replaced(plugins, entry) if active else ""
    return PluginRow(entry.kind, entry.name, active, entry.plugin, entry.distribution, replaced, note)


def _replaced(plugins: Plugins, entry: Registered) -> str:
    """Name the plugin that would have done what ``entry`` does, had the configuration said nothing."""
    name = DEFAULTS.get(entry.kind, entry.name)
    if entry.kind == "executor":
        with_devices = {other.name for other in executors(plugins) if other.value.devices()}
        name = next((usual for usual in DEFAULT_EXECUTORS if usual in with_devices), DEFAULT_EXECUTORS[-1])
    usual = f"djinn-{entry.kind}-{name}"
    present = usual in plugins.distributions or usual in plugins.disabled
    return usual if present and usual != entry.plugin else ""


def _kind_of(plugin: str) -> str:
    """Guess from a plugin's name, by the convention ``<project>-<kind>-<name>``, what kind it brings; or nothing."""
    return next((part for part in plugin.split("-") if part in KINDS), "")
