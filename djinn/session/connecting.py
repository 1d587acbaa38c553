"""Connecting to executors, as the settings say."""

from __future__ import annotations

from djinn.kinds.backend import PluginRegistry
from djinn.kinds.transport import Connection, ConnectOptions, Transport
from djinn.session.config import Config
from djinn.session.retry import patiently

__all__ = ("connect",)


def connect(config: Config, plugins: PluginRegistry, address: str) -> Connection:
    """Connect to an executor; an empty address stands for one in this process.

    A server that has too much to do says when to come again, which is done within `Config.connect_timeout_s`.

    Raises:
        TransportError: The server cannot be reached, or refuses.
    """
    scheme = address.partition("://")[0] if address else "local"
    transport: Transport = plugins.transport_for(scheme)
    return patiently(lambda left_s: transport.connect(address, ConnectOptions(
        token=config.token, owner=config.owner, connect_timeout_s=left_s,
        request_timeout_s=config.request_timeout_s, resume=config.resume, resume_timeout_s=config.resume_timeout_s,
        resume_bytes=config.resume_bytes,
        tls_ca=config.tls_ca, tls_cert=config.tls_cert, tls_key=config.tls_key, open_executor=lambda:
        plugins.find_executor(config.device).value.open(config.device))), config.connect_timeout_s)
