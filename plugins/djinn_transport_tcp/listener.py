"""The server's end: a listening socket and the connections it accepts."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Sequence

import torch

from djinn.errors import ConfigurationError, RemoteTimeoutError, TransportError
from djinn.kinds.transport import ListenOptions
from djinn.protocol.frames import MAX_BODY_BYTES, MAX_GREETING_BYTES, MAX_HEADER_BYTES
from djinn.protocol.messages import Message, Refusal
from djinn_transport_tcp.address import format_address, parse_address
from djinn_transport_tcp.sockets import ByteStream, configure
from djinn_transport_tcp.stream import FrameStream

__all__ = ("TcpChannel", "TcpListener", "listen")

BACKLOG = 128
TICK_S = 1.0
"""How often `TcpListener.accept` looks whether it was closed, where closing does not wake it."""
PAUSE_S = 0.1
"""Pause after the system could not give a new connection, for example for want of file descriptors."""
LINGER_S = 0.5
LINGER_BYTES = 2**24
"""How long, and how far, to go on reading after a refusal: closing with unread bytes would destroy it on its way."""

_UNUSABLE = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})

_log = logging.getLogger("djinn.transport")


def listen(address: str, options: ListenOptions) -> TcpListener:
    """Listen on an address; see `djinn.kinds.transport.Transport.listen`."""
    host, port = parse_address(address, listening=True)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, target = found[0]
        sock = socket.create_server(target, family=family, backlog=BACKLOG)
    except OSError as error:
        raise TransportError(f"Cannot listen on {address}: {error.strerror or error}.",
                             hint="Choose a free port (0 finds one) and an address of this machine.") from None
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"The host in {address!r} makes no sense: {error}.") from None
    return TcpListener(host, sock, options)


class TcpListener:
    """Accepts connections; see `djinn.kinds.transport.Listener`.

    Attributes:
        address: Address that clients connect to, with the port that was really taken.
    """

    def __init__(self, host: str, sock: socket.socket, options: ListenOptions) -> None:
        self.address = format_address(host, sock.getsockname()[1])
        self._socket = sock
        self._options = options
        self._closed = False
        sock.settimeout(TICK_S)

    def accept(self) -> TcpChannel | None:
        """Wait for a connection; ``None`` once the listener is closed or the system has taken its socket away."""
        while not self._closed:
            try:
                sock, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed:
                    break
                if error.errno in _UNUSABLE:
                    _log.error("%s can no longer be listened on: %s", self.address, error)  # no bug
                    break
                _log.warning("no connection could be accepted on %s: %s", self.address, error)
                time.sleep(PAUSE_S)
                continue
            try:
                configure(sock, user_timeout_s=self._options.progress_timeout_s)
            except OSError as error:
                _log.info("A connection was gone before it was accepted: %s", error)
                sock.close()
                continue
            return TcpChannel(format_address(peer[0], peer[1]), sock, self._options)
        return None

    def close(self) -> None:
        """Stop accepting. Never raises, may be called twice or from another thread."""
        self._closed = True
        # Only some systems know this for a listening socket; `accept` notices by itself within a tick.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class TcpChannel:
    """The server's end of one connection; see `djinn.kinds.transport.Channel`.

    Until `greeted` is called, a frame may have `MAX_GREETING_BYTES` and no body, and everything together takes at most
    the greeting's time.
    """

    def __init__(self, peer: str, sock: socket.socket, options: ListenOptions) -> None:
        self.peer = peer
        self._options = options
        self._frames = FrameStream(ByteStream(sock))
        self._frames.max_header_bytes = MAX_GREETING_BYTES
        self._frames.max_body_bytes = 0
        self._frames.stream.deadline = time.monotonic() + options.greeting_timeout_s

    def receive(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Wait for the next message; see `djinn.kinds.transport.Channel.receive`."""
        stream = self._frames.stream
        try:
            stream.stall_timeout_s = None
            if not stream.wait():
                return None
            stream.stall_timeout_s = self._options.progress_timeout_s
            return self._frames.read()
        except (OSError, EOFError) as error:
            raise self._broken(error) from None

    def send(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message with its tensors. A refusal is the last message: nothing that comes after it is looked at.

        Raises:
            TransportError: The connection broke, or the other side did not take it in time.
        """
        self._frames.stream.stall_timeout_s = self._options.progress_timeout_s
        try:
            self._frames.write(sequence, message, tensors)
        except OSError as error:
            raise self._broken(error) from None
        if isinstance(message, Refusal):
            # Whatever the other side does from here on is its own affair.
            with contextlib.suppress(OSError):
                self._linger()

    def greeted(self) -> None:
        """Lift the limits that hold before the other side has said who it is."""
        self._frames.max_header_bytes = MAX_HEADER_BYTES
        self._frames.max_body_bytes = min(self._options.max_body_bytes, MAX_BODY_BYTES)
        self._frames.stream.deadline = None

    def close(self) -> None:
        """Close the connection. Never raises, may be called twice or from another thread."""
        self._frames.stream.close()

    def _linger(self) -> None:
        stream = self._frames.stream
        stream.end_sending()
        stream.deadline = time.monotonic() + LINGER_S
        scrap = memoryview(bytearray(2**16))
        end = stream.bytes_received + LINGER_BYTES
        while stream.bytes_received < end and stream.receive([scrap]) == len(scrap):
            pass

    def _broken(self, error: OSError | EOFError) -> TransportError:
        kind = RemoteTimeoutError if isinstance(error, TimeoutError) else TransportError
        return kind(f"The connection to {self.peer} broke: {error}.", hint="Its client has to start a new session.")
