"""TLS: an encrypted byte stream between two ends that check each other's certificates."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

from djinn.errors import ConfigurationError
from djinn.kinds.transport import ConnectOptions
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.common.settings.connection import TlsSettings

__all__ = ("PlaintextError", "TlsError", "TlsSocket", "client_context", "server_context")

T = TypeVar("T")

RECORD_BYTES = 2**14
"""The size of a TLS record; smaller neighbouring pieces are sent as one record."""
LINGER_S = 0.5
"""How long to read after a failed handshake: closing with unread bytes would discard the reason in transit."""
_FRAME_BEGIN = b"D"
"""First byte of djinn's frames; no TLS message begins with it."""


class TlsError(OSError):
    """The TLS handshake failed.

    Attributes:
        hint: How to fix it.
    """

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


class PlaintextError(OSError):
    """The client uses djinn's protocol without TLS. None of its data has been read."""


def client_context(options: ConnectOptions) -> ssl.SSLContext:
    """Create a client's TLS 1.3 context; the server's certificate and name are checked.

    Raises:
        ConfigurationError: A file, or the pinned certificate, cannot be used.
    """
    files = options.settings(TlsSettings)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if options.tls_pin:
        _load("certificate", "the server's process", lambda: context.load_verify_locations(cadata=options.tls_pin))
    elif files.tls_ca:
        _load("authorities", files.tls_ca, lambda: context.load_verify_locations(files.tls_ca))
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if files.tls_cert:
        _load_pair(context, files.tls_cert, files.tls_key)
    return context


def server_context(options: ListenOptions) -> ssl.SSLContext:
    """Create a server's TLS 1.3 context.

    Raises:
        ConfigurationError: A file is missing or cannot be used.
    """
    if not options.tls_cert:
        raise ConfigurationError("A server on a tls:// address needs a certificate.",
                                 hint="Give it with --tls-cert and --tls-key.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # TLS sessions are never resumed, so tickets would only be unexpected bytes.
    context.num_tickets = 0
    _load_pair(context, options.tls_cert, options.tls_key)
    if options.tls_client_ca:
        # The option may hold the certificates themselves, for processes that cannot open the file.
        given = options.tls_client_ca
        _load("authorities", "the server" if "\n" in given else given, lambda: context.load_verify_locations(
            **({"cadata": given} if "\n" in given else {"cafile": given})))
        context.verify_mode = ssl.CERT_REQUIRED
        if context.cert_store_stats()["crl"]:
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


def _load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    # Without a given password, OpenSSL would prompt for that of an encrypted key on the terminal, and block.
    _load("certificate and key", f"{cert}, {key}" if key else cert,
          lambda: context.load_cert_chain(cert, key or None, password=lambda: b""))


def _load(what: str, path: str, load: Callable[[], None]) -> None:
    try:
        load()
    except OSError as error:
        raise ConfigurationError(f"The {what} of {path} cannot be used: {_words(error)}.",
                                 hint="Give PEM files that this user can read, and the certificate's key without a "
                                      "password.") from None


class TlsSocket:
    """A TLS connection with the socket methods that `ByteStream` uses.

    The first transfer performs the handshake. A wait ends with a `BlockingIOError`, like that of a socket with
    ``SO_RCVTIMEO``.

    Args:
        sock: A connected socket; owned by this object.
        context: This side's TLS context.
        server_name: Name or address that the other end's certificate must have; empty on a server's side.

    Concurrency:
        One thread at a time may send and one receive; `shutdown` may be called by any. OpenSSL itself allows one at a
        time: the lock is held while it computes, never during a wait.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_name: str = "") -> None:
        self._is_server = not server_name
        self._socket = context.wrap_socket(sock, server_side=self._is_server, do_handshake_on_connect=False,
                                           server_hostname=server_name or None)
        self._socket.settimeout(0)
        self._lock = threading.Lock()
        self._waits_s = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}
        self._is_agreed = False
        self._is_tls = not self._is_server
        self.family = self._socket.family

    def set_wait(self, option: int, timeout_s: float) -> None:
        """Set the timeout for receiving (``SO_RCVTIMEO``) or for sending (``SO_SNDTIMEO``)."""
        self._waits_s[option] = timeout_s

    def fileno(self) -> int:
        """Return the descriptor of the underlying socket."""
        return self._socket.fileno()

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        """Return an option of the underlying socket."""
        return self._socket.getsockopt(level, option, length)

    def pending(self) -> int:
        """Return how many bytes have been decrypted and not yet received."""
        with self._lock:
            return self._socket.pending()

    def certificate_expires_s(self) -> float | None:
        """Return when the other end's certificate expires, in seconds since 1970; ``None`` if it has presented none."""
        with self._lock:
            shown = self._socket.getpeercert()
        ends = shown.get("notAfter") if shown else None
        return ssl.cert_time_to_seconds(ends) if isinstance(ends, str) else None

    def peek(self) -> bytes:
        """Return the next byte of the underlying socket without receiving it."""
        return socket.socket.recv(self._socket, 1, socket.MSG_PEEK)

    def recv_into(self, view: memoryview, length: int = 0, flags: int = 0) -> int:
        """Receive into a view: all of it with ``MSG_WAITALL``, unless the wait is too long."""
        filled = 0
        while filled < len(view):
            try:
                count = self._run(socket.SO_RCVTIMEO, lambda: self._socket.recv_into(view[filled:]))  # noqa: B023  # called at once
            except BlockingIOError:
                if filled:
                    break
                raise
            filled += count
            if not count or not flags & socket.MSG_WAITALL:
                break
        return filled

    def send(self, data: memoryview | bytes) -> int:
        """Send as much as possible at once, at least a byte."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[memoryview | bytes], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """Send buffers in order, as much as possible at once; at least a byte, except with ``MSG_DONTWAIT``."""
        waits = not flags & getattr(socket, "MSG_DONTWAIT", 0)
        sent = 0
        for piece in _pieces(buffers):
            done = 0
            while done < len(piece):
                try:
                    count = self._run(socket.SO_SNDTIMEO, lambda: self._socket.send(piece[done:]),  # noqa: B023  # called at once
                                      waits=waits and not sent)
                except BlockingIOError:
                    if sent:
                        return sent
                    raise
                done += count
                sent += count
        return sent

    def recv_into_now(self, view: memoryview) -> int:
        """Receive what has arrived; raises what `ssl` raises if it would have to wait."""
        return self._run_now(lambda: self._socket.recv_into(view))

    def send_now(self, data: bytes) -> int:
        """Send what fits; raises what `ssl` raises if it would have to wait."""
        return self._run_now(lambda: self._socket.send(data))

    def skip_now(self, length: int) -> int:
        """Receive what has arrived and drop it, without decryption; return how many bytes those were."""
        return len(socket.socket.recv(self._socket, length))

    def shutdown(self, how: int) -> None:
        """Shut the connection down below TLS, which wakes waiting threads."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def detach_plain(self) -> socket.socket:
        """Return the underlying socket, from which nothing was read, for use without TLS."""
        family, kind, protocol = self._socket.family, self._socket.type, self._socket.proto
        return socket.socket(family, kind, protocol, fileno=self._socket.detach())

    def _run(self, option: int, call: Callable[[], T], *, waits: bool = True) -> T:
        """Perform an operation as soon as TLS can."""
        if not self._is_agreed:
            self._agree(option)
        try:
            return self._repeat(option, call, waits=waits)
        except ssl.SSLError as error:
            raise _explained(error, self._is_server) from None

    def _agree(self, option: int) -> None:
        try:
            self._repeat(option, self._continue_handshake)
        except ssl.SSLError as error:
            if self._is_server:
                self._linger()
            raise _explained(error, self._is_server) from None

    def _continue_handshake(self) -> None:
        """Continue the handshake as far as that is possible without waiting."""
        if not self._is_tls and self.peek() == _FRAME_BEGIN:
            raise PlaintextError("it speaks djinn's protocol without TLS")
        self._is_tls = True
        self._socket.do_handshake()
        self._is_agreed = True

    def _run_now(self, call: Callable[[], T]) -> T:
        """Perform an operation, after the handshake, as far as that is possible without waiting."""
        try:
            with self._lock:
                if not self._is_agreed:
                    self._continue_handshake()
                return call()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            raise _explained(error, self._is_server) from None

    def _repeat(self, option: int, call: Callable[[], T], *, waits: bool = True) -> T:
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                to_write = False
            except ssl.SSLWantWriteError:
                to_write = True
            except BlockingIOError:
                to_write = False
            if not waits or not self._poll(option, to_write=to_write):
                raise BlockingIOError

    def _poll(self, option: int, *, to_write: bool) -> bool:
        wait_s = self._waits_s[option]
        if not hasattr(select, "poll"):
            pair: tuple[list[int], list[int]] = ([], [self.fileno()]) if to_write else ([self.fileno()], [])
            return any(select.select(*pair, [], None if wait_s < 0 else wait_s))
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT if to_write else select.POLLIN)
        return bool(poll.poll(None if wait_s < 0 else wait_s * 1000))

    def _linger(self) -> None:
        """Give the other end time to read the reason, before the connection is closed."""
        until = monotonic() + LINGER_S
        with contextlib.suppress(OSError):  # errors of the other side no longer matter
            self.shutdown(socket.SHUT_WR)
            while (left_s := until - monotonic()) > 0:
                self._waits_s[socket.SO_RCVTIMEO] = left_s
                if not self._repeat(socket.SO_RCVTIMEO, lambda: socket.socket.recv(self._socket, 2**16)):
                    return


def _pieces(buffers: Sequence[memoryview | bytes]) -> list[memoryview]:
    """Join small neighbouring buffers, so that each does not become its own record."""
    made: list[memoryview] = []
    small: list[memoryview | bytes] = []
    length = 0
    for buffer in [*buffers, b""]:
        if small and (not buffer or length + len(buffer) > RECORD_BYTES):
            made.append(memoryview(b"".join(small)) if len(small) > 1 else memoryview(small[0]))
            small, length = [], 0
        if len(buffer) > RECORD_BYTES:
            made.append(memoryview(buffer))
        elif buffer:
            small.append(buffer)
            length += len(buffer)
    return made


def _words(error: OSError) -> str:
    reason = getattr(error, "reason", "")
    return reason.lower().replace("_", " ") if reason else error.strerror or str(error)


def _explained(error: ssl.SSLError, is_server: bool) -> TlsError:
    """Convert an error to one that explains the failure, with a hint on the client's side."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLEOFError):
        return TlsError("it ended in the middle of TLS")
    if is_server:
        if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason or "CERTIFICATE_UNKNOWN" in reason:
            return TlsError(f"its side does not trust this server's certificate ({_words(error)})")
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return TlsError("it has shown no certificate")
        if isinstance(error, ssl.SSLCertVerificationError):
            return TlsError(f"its certificate is not trusted: {error.verify_message}")
        return TlsError(f"TLS 1.3 could not be agreed on: {_words(error)}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(f"its certificate is not trusted: {error.verify_message.rstrip('.')}",
                        "Give the certificate of its authority with DJINN_TLS_CA or djinn.init(tls_ca=...), and "
                        "connect by a name that its certificate has.")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return TlsError(f"it wants a certificate of this client that it trusts ({_words(error)})",
                        "Give one with DJINN_TLS_CERT and DJINN_TLS_KEY, or djinn.init(tls_cert=..., tls_key=...).")
    return TlsError(f"TLS 1.3 could not be agreed on: {_words(error)}",
                    "If the server was started without --tls-cert, its address begins with tcp://.")
