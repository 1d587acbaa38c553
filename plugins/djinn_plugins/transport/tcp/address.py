"""Addresses of the forms ``tcp://host:port``, ``tls://host:port`` and ``unix:///path/to.sock``."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys

from djinn.errors import ConfigurationError
from djinn_plugins.common.net.urls import url_of

__all__ = ("parse_address", "parse_path", "redirected")

MAX_PORT = 65535
_FORM = re.compile(r"(?P<scheme>tcp|tls)://(?:\[(?P<bracketed>[^\[\]\s/]+)\]|(?P<plain>[^\[\]:/?#@\s\x00]+)):(?P<port>[0-9]{1,5})/?")
_HINT = "Write it as tcp://host:port, for example tcp://127.0.0.1:7070, and an IPv6 host in brackets: tcp://[::1]:7070."
UNIX = "unix://"
MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Longest path that fits into the system's ``sockaddr_un`` with its terminating zero."""
_UNIX_HINT = "Write it as unix:///path/to.sock, with the whole path."


def parse_address(address: str, *, scheme: str = "tcp", listening: bool = False) -> tuple[str, int]:
    """Parse an address.

    Args:
        address: For example ``tcp://127.0.0.1:7070`` or ``tcp://[::1]:7070``.
        scheme: The expected scheme.
        listening: Accept port 0, which stands for any free port.

    Returns:
        Host, without brackets, and port.

    Raises:
        ConfigurationError: The address is not of that form.
    """
    match = _FORM.fullmatch(address)
    if match is None or match["scheme"] != scheme:
        raise ConfigurationError(f"{address!r} is not the address of a server.", hint=_HINT)
    port = int(match["port"])
    if port > MAX_PORT or (port == 0 and not listening):
        raise ConfigurationError(f"Port {port} in {address!r} is not between 1 and {MAX_PORT}.", hint=_HINT)
    host: str = match["plain"] or match["bracketed"]
    if match["bracketed"]:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ConfigurationError(f"{host!r} in {address!r} is not an IPv6 address: {error}.", hint=_HINT) from None
    return host, port


def parse_path(address: str) -> str:
    """Parse the address of a Unix-domain socket.

    Args:
        address: For example ``unix:///run/user/1000/djinn.sock``.

    Returns:
        The socket's path.

    Raises:
        ConfigurationError: The address is not of that form, the path is too long for a socket, or this system has no
            such sockets.
    """
    path = address.removeprefix(UNIX)
    if path == address or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigurationError(f"{address!r} is not the address of a Unix-domain socket.", hint=_UNIX_HINT)
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError(f"{address!r} cannot be used: this system has no Unix-domain sockets.",
                                 hint="Use tcp://127.0.0.1:PORT instead.")
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigurationError(f"The path in {address!r} has {length} bytes; a socket's may have {MAX_PATH_BYTES}.",
                                 hint="Choose a shorter path, for example in /tmp or in XDG_RUNTIME_DIR.")
    return path


def redirected(address: str, target: str) -> str:
    """Return the address that a server redirects a client to.

    Args:
        address: The address that the client connected to.
        target: `djinn.wire.messages.Redirect.address`.

    Raises:
        ConfigurationError: It is not an address, or has another scheme: a redirect must not lead away from encryption.
    """
    scheme = address.partition("://")[0]
    if scheme == "unix":
        parse_path(target)
        return target
    if target.startswith(":"):
        host, _ = parse_address(address, scheme=scheme)
        target = url_of(scheme, host, int(target[1:])) if target[1:].isdecimal() else target
    parse_address(target, scheme=scheme)
    return target
