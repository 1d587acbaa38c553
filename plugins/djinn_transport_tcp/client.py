"""The client's end of a connection."""

from __future__ import annotations

import platform
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from djinn.errors import (
    ConfigurationError,
    DjinnError,
    ProtocolError,
    ProtocolVersionError,
    RefusedError,
    RemoteTimeoutError,
    TransportError,
)
from djinn.kinds.transport import ConnectOptions
from djinn.protocol.messages import (
    PROTOCOL_VERSION,
    Batch,
    Courier,
    Hello,
    Message,
    Redirect,
    Refusal,
    Result,
    Welcome,
)
from djinn.protocol.reuse import after, introduce
from djinn_transport_tcp.address import parse_address, parse_path, redirected
from djinn_transport_tcp.outbox import Outbox
from djinn_transport_tcp.sockets import ByteStream, StreamSocket, configure
from djinn_transport_tcp.stream import FrameStream, views_of
from djinn_transport_tcp.tls import TlsError, TlsSocket, client_context

__all__ = ("SocketConnection", "connect", "connect_tls", "connect_unix", "open_tcp", "open_unix")

LAST_WORDS_S = 0.5
"""How long to look for the server's reason after it has stopped to listen."""
_START = "Start a server there with `djinn serve`, or correct the address in DJINN_SERVER or djinn.init(server=...)."
_AGAIN = "What it held is lost. See the server's log for the reason, then call djinn.init() to start a new session."


def connect(address: str, options: ConnectOptions) -> SocketConnection:
    """Connect to a server over TCP and greet it; see `djinn.kinds.transport.Transport.connect`."""
    return _connect(address, open_tcp, options)


def connect_tls(address: str, options: ConnectOptions) -> SocketConnection:
    """Connect to a server over TLS and greet it; see `djinn.kinds.transport.Transport.connect`."""
    parse_address(address, scheme="tls")
    context = client_context(options)
    return _connect(address, lambda target, _: _open_tls(target, context, options), options)


def connect_unix(address: str, options: ConnectOptions) -> SocketConnection:
    """Connect to a server on this machine and greet it; see `djinn.kinds.transport.Transport.connect`."""
    return _connect(address, open_unix, options)


def _connect(
    address: str, opened: Callable[[str, ConnectOptions], FrameStream], options: ConnectOptions
) -> SocketConnection:
    deadline = time.monotonic() + options.connect_timeout_s
    connection = SocketConnection(address, opened(address, options), options.request_timeout_s)
    redirect = connection.greet(options.token, deadline, options.owner)
    if redirect is None:
        return connection
    connection.close()
    try:
        target = redirected(address, redirect.address)
    except ConfigurationError as error:
        raise TransportError(f"{address} leads to {redirect.address[:100]!r}, where nobody should go: {error.summary}",
                             hint="See how the server was started.") from None
    connection = SocketConnection(address, opened(target, options), options.request_timeout_s)
    if connection.greet("", deadline, options.owner, secret=options.token, ticket=redirect.ticket) is not None:
        connection.close()
        raise TransportError(f"{address} leads to {target}, and that leads elsewhere again.",
                             hint="See how the server was started.")
    return connection


def open_tcp(address: str, options: ConnectOptions) -> FrameStream:
    """Connect over TCP, without a greeting.

    Raises:
        TransportError: Nobody answers there.
        ConfigurationError: The address makes no sense.
    """
    host, port = parse_address(address)
    return _open(address, lambda: socket.create_connection((host, port), timeout=options.connect_timeout_s), options)


def _open_tls(address: str, context: ssl.SSLContext, options: ConnectOptions) -> FrameStream:
    """Connect over TLS, without a greeting; the handshake comes with it. Raises as `open_tcp` does."""
    host, port = parse_address(address, scheme="tls")

    def open_socket() -> StreamSocket:
        sock = socket.create_connection((host, port), timeout=options.connect_timeout_s)
        try:
            configure(sock)
            return TlsSocket(sock, context, host)
        except BaseException:
            sock.close()
            raise

    return _open(address, open_socket, options)


def open_unix(address: str, options: ConnectOptions) -> FrameStream:
    """Connect to a Unix-domain socket, without a greeting.

    Raises:
        TransportError: Nobody answers there.
        ConfigurationError: The address makes no sense.
    """
    path = parse_path(address)

    def open_socket() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(options.connect_timeout_s)
            sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return sock

    return _open(address, open_socket, options)


def _open(address: str, open_socket: Callable[[], StreamSocket], options: ConnectOptions) -> FrameStream:
    try:
        sock = open_socket()
    except (TimeoutError, BlockingIOError):
        # The latter is how Linux says that the queue of a Unix-domain socket is full.
        raise RemoteTimeoutError(f"Nobody answered at {address} within {options.connect_timeout_s:g} s.",
                                 hint=_START) from None
    except OSError as error:
        raise TransportError(f"Nobody answers at {address}: {_reason(error)}.", hint=_START) from None
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"The host in {address!r} makes no sense: {error}.", hint=_START) from None
    try:
        if isinstance(sock, socket.socket):
            configure(sock)
        return FrameStream(ByteStream(sock))
    except BaseException:
        sock.close()
        raise


FLUSH_EVERY = 8
"""Operations of the first batch that is sent early; execution of a batch overlaps with the recording of the next."""


class SocketConnection:
    """The client's end of a session; see `djinn.kinds.transport.Connection`.

    A frame goes through whole or the connection is closed. So after an exception that is not a `TransportError`, such
    as a `KeyboardInterrupt`, a connection that still works has taken its batch; the answer to an interrupted request is
    read before the next frame is sent, and the failures in it are reported with the next answer.

    `submit` waits for the other side only when more than `MAX_QUEUED_BYTES` would wait to be sent.

    Attributes:
        address: Where it leads.
        welcome: What the server said of itself.
        flush_every: Pending operations worth sending early: the server works while the client records.
    """

    def __init__(self, address: str, frames: FrameStream, request_timeout_s: float | None = None) -> None:
        self.address = address
        self.welcome = Welcome(PROTOCOL_VERSION, "", "", "", "", "")
        self.flush_every = FLUSH_EVERY
        self._frames = frames
        self._outbox = Outbox(frames.stream)
        self._request_timeout_s = request_timeout_s
        self._sequence = 0
        self._owed = False
        self._settled = Result()
        self._lost = ""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far, greeting included."""
        return self._frames.stream.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received so far, greeting included."""
        return self._frames.stream.bytes_received

    @property
    def certificate_expires_s(self) -> float | None:
        """When the server's certificate ends; see `djinn.kinds.transport.CertifiedConnection`."""
        return self._frames.stream.certificate_expires_s

    def greet(
        self, token: str, deadline: float, owner: str = "", *, secret: str = "", ticket: str = ""
    ) -> Redirect | None:
        """Say who this is and learn who answers.

        Args:
            token: The server's token, if it wants one.
            deadline: Time on the monotonic clock until which to wait.
            owner: Whose uploads these are; see `djinn.kinds.transport.ConnectOptions`.
            secret: The token, if it is not to be said again.
            ticket: What to say instead.

        Returns:
            Where to go instead, if this is not the place.

        Raises:
            RefusedError, ProtocolVersionError: The server says no.
            TransportError: What answers is no server, or nothing does.
        """
        return self.introduce(Hello(
            PROTOCOL_VERSION, str(torch.__version__), platform.python_version(), sys.byteorder, token,
            *introduce(owner, token or secret), ticket), deadline)

    def introduce(self, greeting: Hello | Courier, deadline: float) -> Redirect | None:
        """Send a greeting and learn who answers; see `greet`."""
        self._frames.stream.deadline = deadline
        try:
            answer = self._welcomed(greeting)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the connection ends, and it is given back
            raise self._ended(error) from None
        self._frames.stream.deadline = None
        self._frames.stream.stall_timeout_s = self._request_timeout_s
        if isinstance(answer, Redirect):
            return answer
        self.welcome = answer
        return None

    def _welcomed(self, greeting: Hello | Courier) -> Welcome | Redirect:
        self._write(greeting, (), waits=True)
        answer, _ = self._read()
        if isinstance(answer, Redirect) and isinstance(greeting, Hello):
            return answer
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"It answered the greeting with a {type(answer).__name__}.")
        if answer.protocol != PROTOCOL_VERSION or answer.byte_order != sys.byteorder:
            raise ProtocolVersionError(
                f"The server speaks protocol {answer.protocol} and is {answer.byte_order}-endian, this client "
                f"protocol {PROTOCOL_VERSION} and {sys.byteorder}-endian.",
                hint="Install the same djinn release on both, on machines of the same byte order.")
        return answer

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer; see `djinn.kinds.transport.Connection.submit`."""
        if self._lost:
            raise self._closed()
        try:
            if self._owed:
                self._settle()
            self._write(batch, tensors, waits=False)
            self._owed = batch.wants_reply
        except BaseException as error:  # noqa: BLE001  # as in `greet`
            raise self._ended(error) from None

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer; see `djinn.kinds.transport.Connection.request`."""
        if self._lost:
            raise self._closed()
        if not batch.wants_reply:
            batch = msgspec.structs.replace(batch, synchronize=True)
        is_between_frames = False
        try:
            if self._owed:
                self._settle()
            self._write(batch, tensors, waits=True)
            self._owed = is_between_frames = True
            self._frames.stream.wait()
            is_between_frames = False
            result, data = self._answer()
        except BaseException as error:  # noqa: BLE001  # as in `greet`
            raise self._ended(error, is_between_frames) from None
        settled, self._settled = self._settled, Result()
        return after(settled, result), data

    def close(self) -> None:
        """End the session. Never raises, may be called twice."""
        self._lost = self._lost or "it was closed on this side"
        self._disconnect()

    def _settle(self) -> None:
        """Take in an answer that nobody waits for any more: two sides that only send would wait for ever."""
        result, _ = self._answer()
        self._settled = after(self._settled, result)

    def _answer(self) -> tuple[Result, list[torch.Tensor]]:
        message, data = self._read()
        self._owed = False
        if not isinstance(message, Result):
            raise ProtocolError(f"It answered a batch with a {type(message).__name__}.")
        return message, data

    def _write(self, message: Message, tensors: Sequence[torch.Tensor], *, waits: bool) -> None:
        self._sequence += 1
        self._outbox.send(views_of(self._sequence, message, tensors), waits=waits)

    def _disconnect(self) -> None:
        self._frames.close()
        self._outbox.close()

    def _read(self) -> tuple[Message, list[torch.Tensor]]:
        received = self._frames.read()
        if received is None:
            raise EOFError("the server closed it")
        sequence, message, data = received
        if isinstance(message, Refusal):
            raise self._refused(message)
        if sequence != self._sequence:
            raise ProtocolError(f"It answered frame {sequence}, not {self._sequence}.")
        return message, data

    def _closed(self) -> TransportError:
        return TransportError(f"The connection to {self.address} is closed: {self._lost}.", hint=_AGAIN)

    def _ended(self, error: BaseException, is_between_frames: bool = False) -> BaseException:
        """Close the connection, because half a frame cannot be continued; an interrupt between two harms nobody."""
        if isinstance(error, Exception):
            return self._lose(error)
        if not is_between_frames or self._frames.stream.is_torn:
            self._lost = "an exception interrupted a transfer"
            self._disconnect()
        return error

    def _lose(self, error: Exception) -> Exception:
        """Close the connection and say why, in the server's words if it left any."""
        self._lost = "it broke"
        failure = self._explain(error if self._outbox.error is None or isinstance(error, DjinnError)
                                else self._outbox.error)
        self._lost = failure.summary.rstrip(".") if isinstance(failure, DjinnError) else repr(failure)
        self._disconnect()
        return failure

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, ProtocolVersionError):
            return ProtocolVersionError(f"{self.address} cannot be used: {error.summary}", hint=error.hint)
        if isinstance(error, TransportError):
            return error
        if isinstance(error, ProtocolError):
            return TransportError(f"The exchange with {self.address} failed: {error.summary}",
                                  hint=error.hint or _AGAIN)
        if isinstance(error, TlsError):
            return TransportError(f"{self.address} cannot be used: {error}.", hint=error.hint or _AGAIN)
        if isinstance(error, TimeoutError):
            return RemoteTimeoutError(f"The connection to {self.address} is dead: {_reason(error)}.", hint=_AGAIN)
        if isinstance(error, OSError):
            return self._last_words() or TransportError(f"The connection to {self.address} broke: {_reason(error)}.",
                                                        hint=_AGAIN)
        if isinstance(error, EOFError):
            return TransportError(f"The connection to {self.address} is gone: {error}.", hint=_AGAIN)
        return error

    def _last_words(self) -> Exception | None:
        """Read why the server closed a connection while this side was sending, if it said so."""
        self._frames.stream.deadline = time.monotonic() + LAST_WORDS_S
        try:
            received = self._frames.read()
        except (OSError, EOFError, ProtocolError):
            # Whatever this says is less to the point than the error that led here, which is reported instead.
            return None
        return self._refused(received[1]) if received is not None and isinstance(received[1], Refusal) else None

    def _refused(self, refusal: Refusal) -> Exception:
        if refusal.code == ProtocolVersionError.code:
            return ProtocolVersionError(f"The server says: {refusal.summary}", hint=refusal.hint)
        code = "" if refusal.code == RefusedError.code else f" [{refusal.code}]"
        return RefusedError(f"The server at {self.address} says:{code} {refusal.summary}", hint=refusal.hint,
                            retry_after_s=refusal.retry_after_s)


def _reason(error: OSError) -> str:
    return error.strerror if isinstance(error.strerror, str) and error.strerror else str(error)
