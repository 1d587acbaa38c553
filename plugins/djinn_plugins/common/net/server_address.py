"""The server that a session started now would use, for commands that look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.settings import Config

if TYPE_CHECKING:
    from djinn.kinds.backend import PluginRegistry

__all__ = ("server_address",)


def server_address(plugins: PluginRegistry) -> str:
    """Return the address that the settings give, or that a plugin finds, such as a cluster's; empty for none.

    Raises:
        DjinnError: A plugin should find one, and cannot.
    """
    return plugins.settings(Config).server or plugins.hook.djinn_resolve_server(plugins=plugins) or ""
