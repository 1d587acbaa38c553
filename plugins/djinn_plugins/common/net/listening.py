"""Listening with any transport that can."""

from __future__ import annotations

from djinn.errors import ConfigurationError
from djinn.kinds.transport import Transport
from djinn_plugins.common.kinds.transport import Listener, ListeningTransport
from djinn_plugins.common.options import ListenOptions

__all__ = ("listen",)


def listen(transport: Transport, address: str, options: ListenOptions) -> Listener:
    """Listen on an address.

    Raises:
        TransportError: The address cannot be bound.
        ConfigurationError: The address is invalid, or the transport has no listening side.
    """
    if not isinstance(transport, ListeningTransport):
        raise ConfigurationError(f"The transport {transport.name} cannot listen on {address!r}.",
                                 hint="Serve over tcp:// instead.")
    return transport.listen(address, options)
