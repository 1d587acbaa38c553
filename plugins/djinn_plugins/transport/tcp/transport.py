"""The transports as the plugin manager sees them."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs

from djinn.kinds.transport import Connection, ConnectOptions
from djinn.settings import Settings
from djinn.wire.messages import PeerHello
from djinn_plugins.common.kinds.transport import Channel, Listener, PeerConnection
from djinn_plugins.common.options import ListenOptions

__all__ = ("TcpTransport", "TlsTransport", "UnixTransport")


class TcpTransport:
    """Sessions over TCP; see `djinn.kinds.transport.Transport`."""

    name = "tcp"
    scheme = "tcp"
    resumes = True
    """Sessions continue over a new connection when theirs breaks."""

    def connect(self, address: str, options: ConnectOptions) -> Connection:
        """Connect and greet; see `djinn.kinds.transport.Transport.connect`."""
        from djinn_plugins.client.upload_dedup import reusing
        from djinn_plugins.transport.tcp.client import connect

        return reusing(_with_retries(connect, address, options))

    def connect_peer(self, address: str, peer: PeerHello, options: ConnectOptions) -> PeerConnection:
        """Connect and greet as a peer; see `djinn_plugins.common.kinds.transport.SupportsPeers.connect_peer`."""
        from djinn_plugins.transport.tcp.client import open_tcp
        from djinn_plugins.transport.tcp.peer import connect_peer

        return connect_peer(address, peer, options, open_tcp)

    def adopt_peer(self, descriptor: int, received: bytes, address: str, options: ConnectOptions) -> PeerConnection:
        """Take over a connection for sending; see `SupportsPeerRelay.adopt_peer`."""
        from djinn_plugins.transport.tcp.peer import adopt_peer

        return adopt_peer(descriptor, received, address, options)

    def listen(self, address: str, options: ListenOptions) -> Listener:
        """Listen on an address; see `djinn_plugins.common.kinds.transport.ListeningTransport.listen`."""
        from djinn_plugins.transport.tcp.listener import listen

        return listen(address, options)

    def adopt(self, descriptor: int, received: bytes, peer: str, options: ListenOptions) -> Channel:
        """Take over a connection; see `djinn_plugins.common.kinds.transport.SupportsAdoption.adopt`."""
        from djinn_plugins.transport.tcp.listener import adopt

        return adopt(descriptor, received, peer, options)


class TlsTransport:
    """Sessions over TCP with TLS 1.3; see `djinn.kinds.transport.Transport`."""

    name = "tls"
    scheme = "tls"
    resumes = True
    """As over TCP."""
    encrypts = True
    """It listens with a certificate only."""

    def connect(self, address: str, options: ConnectOptions) -> Connection:
        """Connect and greet; see `djinn.kinds.transport.Transport.connect`."""
        from djinn_plugins.client.upload_dedup import reusing
        from djinn_plugins.transport.tcp.client import connect_tls

        return reusing(_with_retries(connect_tls, address, options))

    def listen(self, address: str, options: ListenOptions) -> Listener:
        """Listen on an address; see `djinn_plugins.common.kinds.transport.ListeningTransport.listen`."""
        from djinn_plugins.transport.tcp.listener import listen_tls

        return listen_tls(address, options)


class UnixTransport:
    """Sessions over Unix-domain sockets, between processes of one machine; see `djinn.kinds.transport.Transport`."""

    name = "unix"
    scheme = "unix"
    resumes = True
    """As over TCP."""

    @property
    def loopback_address(self) -> str:
        """An address to listen on in tests, different each time."""
        return f"unix://{Path(tempfile.gettempdir()) / f'djinn-{os.getpid()}-{secrets.token_hex(4)}.sock'}"

    def connect(self, address: str, options: ConnectOptions) -> Connection:
        """Connect and greet; see `djinn.kinds.transport.Transport.connect`."""
        from djinn_plugins.common.settings.connection import ResumeSettings, UploadSettings
        from djinn_plugins.transport.tcp.client import connect_unix

        # Digests bring no benefit on one machine.
        settings = Settings(options.settings(ResumeSettings), UploadSettings(owner=""))
        return _with_retries(connect_unix, address, attrs.evolve(options, settings=settings))

    def connect_peer(self, address: str, peer: PeerHello, options: ConnectOptions) -> PeerConnection:
        """Connect and greet as a peer; see `djinn_plugins.common.kinds.transport.SupportsPeers.connect_peer`."""
        from djinn_plugins.transport.tcp.client import open_unix
        from djinn_plugins.transport.tcp.peer import connect_peer

        return connect_peer(address, peer, options, open_unix)

    def adopt_peer(self, descriptor: int, received: bytes, address: str, options: ConnectOptions) -> PeerConnection:
        """Take over a connection for sending; see `SupportsPeerRelay.adopt_peer`."""
        from djinn_plugins.transport.tcp.peer import adopt_peer

        return adopt_peer(descriptor, received, address, options)

    def listen(self, address: str, options: ListenOptions) -> Listener:
        """Listen on a path; see `djinn_plugins.common.kinds.transport.ListeningTransport.listen`."""
        from djinn_plugins.transport.tcp.listener import listen_unix

        return listen_unix(address, options)

    def adopt(self, descriptor: int, received: bytes, peer: str, options: ListenOptions) -> Channel:
        """Take over a connection; see `djinn_plugins.common.kinds.transport.SupportsAdoption.adopt`."""
        from djinn_plugins.transport.tcp.listener import adopt

        return adopt(descriptor, received, peer, options)


def _with_retries(
    connect: Callable[[str, ConnectOptions], Connection], address: str, options: ConnectOptions
) -> Connection:
    """Connect, and try again when a server that is full says so, if the options ask for that."""
    if not options.retries:
        return connect(address, options)
    from djinn_plugins.common.net.retry import patiently
    from djinn_plugins.common.net.waits import waiting

    with waiting(f"connecting to {address}"):
        return patiently(lambda left_s: connect(address, attrs.evolve(options, connect_timeout_s=left_s)),
                         options.connect_timeout_s)
