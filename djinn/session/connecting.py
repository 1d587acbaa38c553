"""Connecting to executors, as the settings say."""

from __future__ import annotations

from djinn.errors import TransportError
from djinn.kinds.backend import PluginRegistry
from djinn.kinds.transport import Connection, ConnectOptions
from djinn.settings import Config

__all__ = ("connect", "connect_first")


def connect(plugins: PluginRegistry, address: str) -> Connection:
    """Connect to an executor; an empty address stands for one that a plugin names, or else for one in this process.

    If a server is full, the transport tries again when the server says, within the setting ``connect_timeout_s``.

    Raises:
        TransportError: The server cannot be reached, or refuses.
    """
    config = plugins.settings(Config)
    address = address or plugins.hook.djinn_resolve_server(plugins=plugins) or ""
    return plugins.transport_for(address.partition("://")[0] or "local").connect(address, ConnectOptions(
        token=config.token, connect_timeout_s=config.connect_timeout_s, request_timeout_s=config.request_timeout_s,
        retries=True, settings=plugins.settings,
        open_executor=lambda: plugins.find_executor(config.device).value.open(config.device)))


def connect_first(plugins: PluginRegistry, address: str) -> Connection:
    """Connect for a session that begins: to another executor, if a plugin names one for a server that does not answer.

    Raises:
        TransportError: The server cannot be reached, or refuses.
    """
    try:
        return connect(plugins, address)
    except TransportError as error:
        if (other := plugins.hook.djinn_replace_server(plugins=plugins, address=address, error=error)) is None:
            raise
        return connect(plugins, other)
