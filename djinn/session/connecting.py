"""Connecting to executors, as the settings say."""

from __future__ import annotations

from djinn.kinds.backend import PluginRegistry
from djinn.kinds.transport import Connection, ConnectOptions, Transport
from djinn.session.retry import patiently
from djinn.settings import Config

__all__ = ("connect",)


def connect(plugins: PluginRegistry, address: str) -> Connection:
    """Connect to an executor; an empty address stands for one in this process.

    A server that has too much to do says when to come again, which is done within the setting ``connect_timeout_s``.

    Raises:
        TransportError: The server cannot be reached, or refuses.
    """
    config = plugins.settings(Config)
    scheme = address.partition("://")[0] if address else "local"
    transport: Transport = plugins.transport_for(scheme)
    return patiently(lambda left_s: transport.connect(address, ConnectOptions(
        token=config.token, connect_timeout_s=left_s, request_timeout_s=config.request_timeout_s,
        settings=plugins.settings, open_executor=lambda:
        plugins.find_executor(config.device).value.open(config.device))), config.connect_timeout_s)
