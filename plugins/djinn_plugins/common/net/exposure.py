"""Addresses that other machines can reach, and their requirements."""

from __future__ import annotations

import ipaddress
import socket

from djinn.errors import ConfigurationError

__all__ = ("check_exposure", "is_loopback")


def check_exposure(host: str, *, is_encrypted: bool, needs_token: bool) -> bool:
    """Reject a host that other machines can reach, unless connections are encrypted and need a token.

    Returns:
        Whether only this machine can connect.

    Raises:
        ConfigurationError: Encryption or a token is missing.
    """
    if is_loopback(host):
        return True
    lacking = [remedy for remedy, has in (
        ("encryption: give a certificate with --tls-cert and --tls-key", is_encrypted),
        ("a token: set DJINN_TOKEN to a secret, or make tokens with `djinn token create NAME` and give --tokens",
         needs_token)) if not has]
    if lacking:
        raise ConfigurationError(f"Other machines could reach {host}, and it has no {'; nor '.join(lacking)}.",
                                 hint="Or listen on 127.0.0.1, and reach it through a tunnel.")
    return False


def is_loopback(host: str) -> bool:
    """Whether every address of a host is a loopback address.

    Raises:
        ConfigurationError: There is no such host.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0)}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"There is no host {host!r}: {error}.",
                                 hint="Give --host an address or name of this machine.") from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
