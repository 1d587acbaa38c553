"""The transport within one process. Only a session that uses it loads the executor's side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.errors import ConfigurationError, RefusedError

if TYPE_CHECKING:
    from djinn.kinds.transport import ConnectOptions
    from djinn.wire.messages import PeerHello
    from djinn_plugins.common.kinds.transport import PeerConnection
    from djinn_plugins.transport.local.connection import LocalConnection

__all__ = ("LocalTransport",)


class LocalTransport:
    """Connects a session to an executor in the same process."""

    name = "local"
    scheme = "local"

    def connect(self, address: str, options: ConnectOptions) -> LocalConnection:
        """Open an executor and a session on it.

        Raises:
            ConfigurationError: No executor was given, or the address is not this transport's.
        """
        if address and not address.startswith(f"{self.scheme}://"):
            raise ConfigurationError(f"The local transport does not lead to {address!r}.",
                                     hint="Leave the address out, or write local://.")
        if options.open_executor is None:
            raise ConfigurationError("The local transport needs an executor in this process.",
                                     hint="Enable an executor plugin, or connect to a server.")
        from djinn_plugins.transport.local.connection import LocalConnection

        return LocalConnection(address or "local://", options.open_executor())

    def connect_peer(self, address: str, peer: PeerHello, options: ConnectOptions) -> PeerConnection:
        """Connect to another session of this process, at ``local://``, with or without its mailbox in hexadecimal.

        Raises:
            RefusedError: There is no such session.
            ConfigurationError: The address is not this transport's.
        """
        if address not in (f"{self.scheme}://", f"{self.scheme}://{peer.mailbox.hex()}"):
            raise ConfigurationError(f"{address!r} leads to no session of this process.",
                                     hint="Bring the value home and upload it there.")
        from djinn_plugins.transport.local.connection import connect_peer

        found = connect_peer(peer, options.is_gone or (lambda: False))
        if found is None:
            raise RefusedError(f"{address} is no session of this process, or has ended.")
        return found
