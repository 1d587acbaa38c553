"""Opens connections: sockets of different kinds, with frames over them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from time import monotonic, sleep

from djinn.errors import ConfigurationError, RemoteTimeoutError, TransportError
from djinn.kinds.transport import PINNED_NAME, ConnectOptions
from djinn_plugins.transport.tcp.address import parse_address, parse_path
from djinn_plugins.transport.tcp.sockets import ByteStream, StreamSocket, configure
from djinn_plugins.transport.tcp.stream import FrameStream
from djinn_plugins.transport.tcp.tls import TlsSocket

__all__ = ("open_tcp", "open_tls", "open_unix", "reason_of")

QUEUE_FULL_S = 0.01
"""Pause between attempts to connect to a server whose queue of new connections is full."""
_START = "Start a server there with `djinn serve`, or correct the address in DJINN_SERVER or djinn.init(server=...)."


def open_tcp(address: str, options: ConnectOptions) -> FrameStream:
    """Connect over TCP, without a greeting.

    Raises:
        TransportError: The address does not answer.
        ConfigurationError: The address is invalid.
    """
    host, port = parse_address(address)
    return _open(address, lambda: socket.create_connection((host, port), timeout=options.connect_timeout_s), options)


def open_tls(address: str, context: ssl.SSLContext, options: ConnectOptions) -> FrameStream:
    """Connect over TLS, without a greeting, including the handshake. Raises as `open_tcp` does."""
    host, port = parse_address(address, scheme="tls")

    def open_socket() -> StreamSocket:
        sock = socket.create_connection((host, port), timeout=options.connect_timeout_s)
        try:
            configure(sock)
            return TlsSocket(sock, context, PINNED_NAME if options.tls_pin else host)
        except BaseException:
            sock.close()
            raise

    return _open(address, open_socket, options)


def open_unix(address: str, options: ConnectOptions) -> FrameStream:
    """Connect to a Unix-domain socket, without a greeting.

    Raises:
        TransportError: The address does not answer.
        ConfigurationError: The address is invalid.
    """
    path = parse_path(address)

    def open_socket() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(options.connect_timeout_s)
            _connect_in_time(sock, path, monotonic() + options.connect_timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock

    return _open(address, open_socket, options)


def _connect_in_time(sock: socket.socket, path: str, until_s: float) -> None:
    """Connect to a path, again and again while more clients connect at the same time than the system lets wait.

    Raises:
        BlockingIOError: It took too long; this is how Linux reports a full queue.
        OSError: Nothing listens there.
    """
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if monotonic() > until_s:
                raise
            sleep(QUEUE_FULL_S)


def _open(address: str, open_socket: Callable[[], StreamSocket], options: ConnectOptions) -> FrameStream:
    try:
        sock = open_socket()
    except (TimeoutError, BlockingIOError):
        raise RemoteTimeoutError(f"Nobody answered at {address} within {options.connect_timeout_s:g} s.",
                                 hint=_START) from None
    except OSError as error:
        raise TransportError(f"Nobody answers at {address}: {reason_of(error)}.", hint=_START) from None
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"The host in {address!r} makes no sense: {error}.", hint=_START) from None
    try:
        if isinstance(sock, socket.socket):
            configure(sock)
        return FrameStream(ByteStream(sock))
    except BaseException:
        sock.close()
        raise


def reason_of(error: OSError) -> str:
    """Return the system's description of an error."""
    return error.strerror if isinstance(error.strerror, str) and error.strerror else str(error)
