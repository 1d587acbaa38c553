"""Asking a directory, from a client or a command.

A directory's address is ``tls://host:port/NAME``, or ``file:PATH``: a file in which the directory has written it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import attrs
import msgspec

from djinn import errors
from djinn.errors import ConfigurationError, DjinnError, ProtocolError, TransportError
from djinn_plugins.cluster.messages import (
    MAX_LOAD_BYTES,
    AskedDirectory,
    DirectoryProblem,
    ListedServer,
    ServerList,
    decoded,
    encoded,
)
from djinn_plugins.common.net.terminal_text import harmless
from djinn_plugins.common.net.urls import url_of

__all__ = ("IN_FILE", "DirectoryAddress", "ask", "parse", "reachable", "trusting")

IN_FILE = "file:"
"""Stands before the path of a file with an address. A directory that is started again elsewhere changes the file."""
MAX_ADDRESS_BYTES = 4096
_HINT = "Write it as tls://HOST:PORT/NAME, as `djinn directory` prints it; tcp:// without encryption."
_CODES = {kind.code: kind for kind in (getattr(errors, name) for name in errors.__all__)}


@attrs.frozen
class DirectoryAddress:
    """The address of a directory.

    Attributes:
        scheme: ``tls`` or ``tcp``.
        host: Name or address, without brackets.
        port: Its port.
        name: The cluster's name; empty for any.
    """

    scheme: str
    host: str
    port: int
    name: str = ""

    def __str__(self) -> str:
        return url_of(self.scheme, self.host, self.port) + (f"/{self.name}" if self.name else "")


def parse(address: str) -> DirectoryAddress:
    """Read an address.

    Raises:
        ConfigurationError: It is invalid.
        TransportError: No directory has written its address into that file.
    """
    if address.startswith(IN_FILE):
        path = address.removeprefix(IN_FILE)
        try:
            with Path(path).open(encoding="utf-8") as file:
                address = file.read(MAX_ADDRESS_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TransportError(f"The address of the directory cannot be read from {path}: {error}.",
                                 hint="See whether the cluster runs, and whether this machine has its files.") from None
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    name = "" if host is None else parts.path.strip("/")
    if host is None or not port or parts.scheme not in ("tls", "tcp") or "/" in name or parts.query or parts.username:
        raise ConfigurationError(f"{address!r} is not the address of a directory.", hint=_HINT)
    return DirectoryAddress(parts.scheme, host, port, name)


def reachable(host: str) -> str:
    """Return a host that others can connect to: this machine's name, for a host that stands for all its addresses."""
    return socket.getfqdn() if host in ("0.0.0.0", "::") else host  # noqa: S104  # compared


def trusting(authorities: str) -> ssl.SSLContext:
    """Return a TLS 1.3 context that checks a directory's certificate and name.

    Args:
        authorities: File with the authorities that are trusted; empty for the system's.

    Raises:
        ConfigurationError: The file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=authorities or None)
    except OSError as error:
        raise ConfigurationError(f"The authorities of {authorities} cannot be used: {error.strerror or error}.",
                                 hint="Give a PEM file that this user can read.") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def ask(address: str, question: Callable[[str], AskedDirectory], *, authorities: str = "", timeout_s: float = 10.0
        ) -> tuple[ListedServer, ...]:
    """Ask a directory for servers.

    Args:
        address: Its address.
        question: Makes the question from the cluster's name.
        authorities: As for `trusting`.
        timeout_s: How long it may take.

    Raises:
        ConfigurationError: The address is invalid.
        TransportError: There is no answer.
        DjinnError: The directory's own answer, such as that the token is wrong.
    """
    parsed, until = parse(address), monotonic() + timeout_s
    try:
        with socket.create_connection((parsed.host, parsed.port), timeout=timeout_s) as plain:
            if parsed.scheme == "tcp":
                line = _answer(plain, encoded(question(parsed.name)), until)
            else:
                with trusting(authorities).wrap_socket(plain, server_hostname=parsed.host) as encrypted:
                    line = _answer(encrypted, encoded(question(parsed.name)), until)
        answer = decoded(line)
    except OSError as error:
        reason = getattr(error, "verify_message", "") or error.strerror or str(error)
        raise TransportError(f"The directory {parsed} does not answer: {reason}.",
                             hint="See whether it runs, and whether the address is right.") from None
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{parsed} is no directory: {error}.", hint=_HINT) from None
    if isinstance(answer, DirectoryProblem):
        raise _CODES.get(answer.code, DjinnError)(harmless(answer.summary), hint=harmless(answer.hint))
    if not isinstance(answer, ServerList):
        raise ProtocolError(f"{parsed} answers with a {type(answer).__name__}.", hint=_HINT)
    return answer.servers


def _answer(sock: socket.socket, request: bytes, until: float) -> bytes:
    sock.sendall(request)
    data = bytearray()
    while not data.endswith(b"\n"):
        # All of the answer must come in time, or one that drips would never be given up.
        sock.settimeout(max(1e-3, until - monotonic()))
        part = sock.recv(2**16)
        data += part
        if not part or len(data) > MAX_LOAD_BYTES:
            raise OSError("it has answered too little, or too much")
    return bytes(data)
