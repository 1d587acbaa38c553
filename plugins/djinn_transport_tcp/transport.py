"""The transport as the plugin manager sees it."""

from __future__ import annotations

from djinn.kinds.transport import Connection, ConnectOptions, Listener, ListenOptions

__all__ = ("TcpTransport",)


class TcpTransport:
    """Sessions over TCP; see `djinn.kinds.transport.Transport`."""

    name = "tcp"
    scheme = "tcp"

    def connect(self, address: str, options: ConnectOptions) -> Connection:
        """Connect and greet; see `djinn.kinds.transport.Transport.connect`."""
        from djinn_transport_tcp.client import connect

        return connect(address, options)

    def listen(self, address: str, options: ListenOptions) -> Listener:
        """Listen on an address; see `djinn.kinds.transport.Transport.listen`."""
        from djinn_transport_tcp.listener import listen

        return listen(address, options)
