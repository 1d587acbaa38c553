"""The server's end: a listening socket and the connections it accepts."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from djinn.errors import ConfigurationError, RefusedError, RemoteTimeoutError, TransportError
from djinn.wire import messages
from djinn.wire.messages import Goodbye, Message, Refusal
from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.common.net.urls import url_of
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.common.wire.frames import MAX_BODY_BYTES, MAX_GREETING_BYTES, MAX_HEADER_BYTES, encode_head
from djinn_plugins.transport.tcp.address import parse_address, parse_path
from djinn_plugins.transport.tcp.sockets import ByteStream, configure
from djinn_plugins.transport.tcp.stream import FrameStream, views_of
from djinn_plugins.transport.tcp.tls import PlaintextError, TlsError, TlsSocket, server_context

__all__ = ("PlainSocketChannel", "SocketChannel", "SocketListener", "adopt", "listen", "listen_tls", "listen_unix")

BACKLOG = 1024
TICK_S = 1.0
"""How often `SocketListener.accept` checks whether it was closed, where closing does not wake it."""
PAUSE_S = 0.1
"""Pause after the system could not provide a new connection, for example for lack of file descriptors."""
LINGER_S = 0.5
LINGER_BYTES = 2**24
"""How long and how many bytes to read after a refusal: closing with unread bytes would discard the refusal."""

_GOODBYE = encode_head(0, len(messages.encode(Goodbye())), 0) + messages.encode(Goodbye())
_UNUSABLE = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})

_log = logging.getLogger("djinn.transport")
_strangers = StrangerLog(_log)


def listen(address: str, options: ListenOptions) -> SocketListener:
    """Listen on an address; see `djinn_plugins.common.kinds.transport.ListeningTransport.listen`."""
    return _listen(address, "tcp", options, lambda peer, sock: PlainSocketChannel(peer, ByteStream(sock), options))


def listen_tls(address: str, options: ListenOptions) -> SocketListener:
    """Listen on an address with TLS; see `djinn_plugins.common.kinds.transport.ListeningTransport.listen`."""
    parse_address(address, scheme="tls", listening=True)
    held = [server_context(options)]

    def renew(options: ListenOptions) -> None:
        held[0] = server_context(options)

    return _listen(address, "tls", options,
                   lambda peer, sock: SocketChannel(peer, ByteStream(TlsSocket(sock, held[0])), options), renew)


def adopt(descriptor: int, received: bytes, peer: str, options: ListenOptions) -> PlainSocketChannel:
    """Take over another process's connection; see `djinn_plugins.common.kinds.transport.SupportsAdoption.adopt`."""
    return PlainSocketChannel(peer, ByteStream(socket.socket(fileno=descriptor), received=received), options)


def _listen(
    address: str, scheme: str, options: ListenOptions, make: Callable[[str, socket.socket], SocketChannel],
    renew: Callable[[ListenOptions], None] | None = None,
) -> SocketListener:
    host, port = parse_address(address, scheme=scheme, listening=True)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, target = found[0]
        sock = socket.create_server(target, family=family, backlog=BACKLOG)
    except OSError as error:
        raise TransportError(f"Cannot listen on {address}: {error.strerror or error}.",
                             hint="Choose a free port (0 finds one) and an address of this machine.") from None
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"The host in {address!r} makes no sense: {error}.") from None
    port = sock.getsockname()[1]
    return SocketListener(url_of(scheme, host, port), sock, options,
                          lambda sock, peer: make(url_of(scheme, peer[0], peer[1]), sock), renew=renew)


def listen_unix(address: str, options: ListenOptions) -> SocketListener:
    """Listen on a path of this machine; see `djinn_plugins.common.kinds.transport.ListeningTransport.listen`.

    Only the user of this process can connect. A socket left behind by a dead server is replaced; the socket of a
    running server, or another kind of file, is refused.
    """
    path = parse_path(address)
    try:
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise _cannot_listen(address, error) from None
    try:
        _bind_privately(sock, path)
        made = Path(path).stat()
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(address, error) from None
    return SocketListener(address, sock, options,
                          lambda sock, _: PlainSocketChannel(address, ByteStream(sock), options),
                          lambda: _remove(path, made))


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that died.

    Raises:
        OSError: A server listens there, or the file is of another kind.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(TICK_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):
            # Its queue is full, so the server is alive.
            pass
    raise OSError(errno.EADDRINUSE, "another server listens there")


def _bind_privately(sock: socket.socket, path: str) -> None:
    """Bind so that others can connect at no moment: on Linux the file takes the socket's mode."""
    os.fchmod(sock.fileno(), 0o600)
    sock.bind(path)
    # Connections are impossible before the socket listens, so this is early enough where the line above has no effect.
    Path(path).chmod(0o600)


def _remove(path: str, made: os.stat_result) -> None:
    """Remove a socket's file, unless another process has replaced it."""
    with contextlib.suppress(OSError):  # the file is already gone
        now = os.lstat(path)
        if (now.st_dev, now.st_ino) == (made.st_dev, made.st_ino):
            Path(path).unlink()


def _cannot_listen(address: str, error: OSError) -> TransportError:
    return TransportError(f"Cannot listen on {address}: {error.strerror or error}.",
                          hint="Choose a path of this machine, in a folder that you may write to, that nothing uses.")


class SocketListener:
    """Accepts connections; see `djinn_plugins.common.kinds.transport.Listener`.

    Attributes:
        address: Address that clients connect to, with the actual port.
    """

    def __init__(
        self, address: str, sock: socket.socket, options: ListenOptions,
        make: Callable[[socket.socket, Any], SocketChannel],
        clean_up: Callable[[], None] = lambda: None,
        renew: Callable[[ListenOptions], None] | None = None,
    ) -> None:
        self.address = address
        self._renew = renew
        self._socket = sock
        self._options = options
        self._make = make
        self._clean_up = clean_up
        self._closed = False
        sock.settimeout(TICK_S)

    def accept(self) -> SocketChannel | None:
        """Wait for a connection; ``None`` once the listener is closed or the system has taken its socket away."""
        while not self._closed:
            try:
                sock, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._is_over(error):
                    break
                sleep(PAUSE_S)
                continue
            if (channel := self._made(sock, peer)) is not None:
                return channel
        return None

    async def accept_async(self) -> SocketChannel | None:
        """Wait for a connection; see `djinn_plugins.common.kinds.transport.SupportsAsyncAccept.accept_async`."""
        import anyio.lowlevel

        await anyio.lowlevel.checkpoint()
        while not self._closed:
            try:
                self._socket.setblocking(False)
                sock, peer = self._socket.accept()
            except BlockingIOError:
                with contextlib.suppress(anyio.ClosedResourceError):
                    await anyio.wait_readable(self._socket)
                continue
            except OSError as error:
                if self._is_over(error):
                    break
                await anyio.sleep(PAUSE_S)
                continue
            if (channel := self._made(sock, peer)) is not None:
                return channel
        return None

    def _is_over(self, error: OSError) -> bool:
        """Whether there will be no more connections, after one could not be accepted."""
        if self._closed:
            return True
        if error.errno in _UNUSABLE:
            _log.error("%s can no longer be listened on: %s", self.address, error)  # no bug
            return True
        _strangers.write(logging.WARNING, "connections that could not be accepted", "no connection could be accepted "
                         "on %s: %s", self.address, error)
        return False

    def _made(self, sock: socket.socket, peer: Any) -> SocketChannel | None:
        try:
            configure(sock)
            return self._make(sock, peer)
        except (OSError, ValueError) as error:
            _strangers.write(logging.INFO, "connections that were gone", "A connection was gone before it was "
                             "accepted: %s", error)
            sock.close()
            return None

    def renew(self, options: ListenOptions) -> None:
        """Use other certificates; see `djinn_plugins.server.reloading.RenewableListener.renew`.

        Has no effect without TLS.
        """
        if self._renew is not None:
            self._renew(options)

    def close(self) -> None:
        """Stop accepting. Never raises; may be called twice or from another thread."""
        if not self._closed:
            self._clean_up()
        self._closed = True
        # Only some systems support this for a listening socket; on others, `accept` notices within a tick.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class SocketChannel:
    """The server's end of one connection; see `djinn_plugins.common.kinds.transport.Channel`.

    Until `greeted` is called, a frame may have `MAX_GREETING_BYTES` and no body, and all frames together must arrive
    within the time for the greeting.
    """

    def __init__(self, peer: str, stream: ByteStream, options: ListenOptions) -> None:
        self.peer = peer
        self._options = options
        self._frames = FrameStream(stream)
        self._frames.max_header_bytes = MAX_GREETING_BYTES
        self._frames.max_body_bytes = 0
        self._frames.digests = True
        self._frames.stream.deadline = monotonic() + options.greeting_timeout_s
        self._frames.stream.keeps_pace = True

    def receive(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Wait for the next message; see `djinn_plugins.common.kinds.transport.Channel.receive`."""
        stream = self._frames.stream
        try:
            stream.stall_timeout_s = None
            if not stream.wait():
                return None
            stream.stall_timeout_s = self._options.progress_timeout_s
            stream.begin_pace()
            return self._frames.read()
        except PlaintextError:
            raise self._plain() from None
        except (OSError, EOFError) as error:
            raise self._broken(error) from None

    async def receive_async(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Wait for the first message.

        See `djinn_plugins.common.kinds.transport.SupportsAsyncHandshake.receive_async`.
        """
        from djinn_plugins.transport.tcp.awaiting import await_frame, linger

        stream = self._frames.stream
        try:
            stream.stall_timeout_s = self._options.progress_timeout_s
            stream.begin_pace()
            await await_frame(self._frames)
            # With a part of a frame, the stream has ended.
            return self._frames.read() if len(stream.ahead) else None
        except PlaintextError:
            raise self._plain() from None
        except (OSError, EOFError) as error:
            if isinstance(error, TlsError):
                await linger(stream, LINGER_S, LINGER_BYTES)
            raise self._broken(error) from None

    async def send_async(self, sequence: int, message: Message) -> None:
        """Send a message; see `djinn_plugins.common.kinds.transport.SupportsAsyncHandshake.send_async`."""
        from djinn_plugins.transport.tcp.awaiting import linger, send_all

        stream = self._frames.stream
        stream.stall_timeout_s = self._options.progress_timeout_s
        try:
            await send_all(stream, b"".join(views_of(sequence, message, ())))
        except OSError as error:
            raise self._broken(error) from None
        if _is_last(message):
            await linger(stream, LINGER_S, LINGER_BYTES)

    @property
    def admit_body(self) -> Callable[[int], None] | None:
        """Admits a body before it is read; see `djinn_plugins.common.kinds.transport.SupportsReceiveLimit`."""
        return self._frames.admit_body

    @admit_body.setter
    def admit_body(self, admit: Callable[[int], None] | None) -> None:
        self._frames.admit_body = admit

    @property
    def received_digest(self) -> int:
        """Digest of the last received message; see `djinn_plugins.common.kinds.transport.SupportsDigests`."""
        return self._frames.digest

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far by this process."""
        return self._frames.stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received so far by this process."""
        return self._frames.stream.bytes_received

    def is_ready(self) -> bool:
        """Whether `receive` can start reading a message at once."""
        return self._frames.stream.is_ready()

    def wait_with(self, descriptor: int, timeout_s: float) -> bool:
        """Wait until there is something to receive, until a descriptor is readable, or for some time.

        Returns:
            Whether the descriptor is readable.
        """
        return self._frames.stream.wait_with(descriptor, timeout_s)

    def is_writable(self) -> bool:
        """Whether a small message can be sent without waiting."""
        return self._frames.stream.is_writable()

    def is_gone(self) -> bool:
        """Whether the other side sends nothing more; earlier data may still be unread."""
        return self._frames.stream.is_gone()

    def has_left(self) -> bool:
        """Whether the other side has already said goodbye, even if earlier messages have not been received yet."""
        return self.is_gone() and self._frames.stream.ends_with(_GOODBYE)

    def send(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message with its tensors.

        A refusal, or a goodbye with a reason, is the last message: later data is ignored.

        Raises:
            TransportError: The connection broke, or the other side did not take it in time.
        """
        self._frames.stream.stall_timeout_s = self._options.progress_timeout_s
        try:
            self._frames.write(sequence, message, tensors)
        except OSError as error:
            raise self._broken(error) from None
        if _is_last(message):
            # The other side's further errors do not matter.
            with contextlib.suppress(OSError):
                self._linger()

    def greeted(self) -> None:
        """Lift the limits that apply before the other side has identified itself."""
        self._frames.max_header_bytes = MAX_HEADER_BYTES
        self._frames.max_body_bytes = min(self._options.max_body_bytes, MAX_BODY_BYTES)
        self._frames.stream.deadline = None

    def close(self) -> None:
        """Close the connection. Never raises; may be called twice or from another thread."""
        self._frames.close()

    def _linger(self) -> None:
        stream = self._frames.stream
        stream.end_sending()
        stream.deadline = monotonic() + LINGER_S
        scrap = memoryview(bytearray(2**16))
        end = stream.bytes_received + LINGER_BYTES
        while stream.bytes_received < end and stream.receive([scrap]) == len(scrap):
            pass

    def _plain(self) -> RefusedError:
        """Continue without TLS, in which the client can read the reason."""
        self._frames.stream.go_on_plain()
        return RefusedError("This server speaks TLS only.", hint="Use its address with tls:// instead of tcp://.")

    def _broken(self, error: OSError | EOFError) -> TransportError:
        kind = RemoteTimeoutError if isinstance(error, TimeoutError) else TransportError
        return kind(f"The connection to {self.peer} broke: {error}.", hint="Its client has to start a new session.")


def _is_last(message: Message) -> bool:
    """Whether nothing follows a message that a server sends."""
    return isinstance(message, Refusal) or (isinstance(message, Goodbye) and bool(message.code))


class PlainSocketChannel(SocketChannel):
    """A connection without encryption, which another process can take over."""

    def detach(self, sequence: int, message: Message) -> tuple[int, bytes]:
        """Release the connection; see `djinn_plugins.common.kinds.transport.SupportsHandover.detach`.

        Raises:
            TransportError: It was closed.
        """
        header = messages.encode(message)
        try:
            descriptor, ahead = self._frames.stream.detach()
        except OSError as error:
            raise self._broken(error) from None
        return descriptor, encode_head(sequence, len(header), 0) + header + ahead
