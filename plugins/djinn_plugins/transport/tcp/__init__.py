"""The transports ``tcp``, ``tls`` and ``unix``: sessions with an executor in another process or on another machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from djinn.kinds.transport import Transport
    from djinn.settings import Declarations

__all__ = ("djinn_add_settings", "djinn_register_transports")


@hookimpl
def djinn_add_settings(settings: Declarations) -> None:
    """Declare the settings of connections: certificates, resuming, and uploads that a server keeps."""
    from djinn_plugins.common.settings.connection import add_connection_settings

    add_connection_settings(settings)


@hookimpl
def djinn_register_transports(register: Callable[[Transport], None]) -> None:
    """Register the transports ``tcp``, ``tls`` and ``unix``."""
    from djinn_plugins.transport.tcp.transport import TcpTransport, TlsTransport, UnixTransport

    register(TcpTransport())
    register(TlsTransport())
    register(UnixTransport())
