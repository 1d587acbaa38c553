"""Addresses of the form ``tcp://host:port``."""

from __future__ import annotations

import ipaddress
import re

from djinn.errors import ConfigurationError

__all__ = ("format_address", "parse_address")

MAX_PORT = 65535
_FORM = re.compile(r"tcp://(?:\[(?P<bracketed>[^\[\]\s/]+)\]|(?P<plain>[^\[\]:/?#@\s\x00]+)):(?P<port>[0-9]{1,5})/?")
_HINT = "Write it as tcp://host:port, for example tcp://127.0.0.1:7070, and an IPv6 host in brackets: tcp://[::1]:7070."


def parse_address(address: str, *, listening: bool = False) -> tuple[str, int]:
    """Take an address apart.

    Args:
        address: For example ``tcp://127.0.0.1:7070`` or ``tcp://[::1]:7070``.
        listening: Accept port 0, which stands for any free one.

    Returns:
        Host, without brackets, and port.

    Raises:
        ConfigurationError: The address is not of that form.
    """
    match = _FORM.fullmatch(address)
    if match is None:
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


def format_address(host: str, port: int) -> str:
    """Put an address together."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
