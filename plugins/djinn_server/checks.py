"""Checks of a server's options that concern several of them."""

from __future__ import annotations

import ipaddress
import socket

from djinn_lib_server.options import LOOPBACK, ServeOptions

from djinn.errors import ConfigurationError
from djinn_server.peers import PeerPolicy

__all__ = ("check_options", "is_loopback")


def check_options(options: ServeOptions, *, needs_token: bool) -> bool:
    """Reject contradictory or unsafe options.

    Args:
        options: The options.
        needs_token: Whether the authenticator requires a token.

    Returns:
        Whether only this machine can connect.

    Raises:
        ConfigurationError: Names the options, and says what to do.
    """
    address, tls = options.address, options.tls
    if not hasattr(socket, "send_fds"):
        raise ConfigurationError("djinn serve needs Linux or another Unix: it gives connections to other processes.",
                                 hint="Clients run anywhere.")
    if address.unix and (address.host != LOOPBACK or address.port or tls.cert):
        raise ConfigurationError("--unix cannot be used with --host, --port or --tls-cert: a server listens on one "
                                 "address, and nothing leaves the machine there.")
    if not all(options.device.names) and len(options.device.names) > 1:
        raise ConfigurationError(f"{options.device.device!r} is no list of devices.",
                                 hint="Write --device cuda:0,cuda:1.")
    if not tls.cert and (tls.key or tls.client_ca):
        raise ConfigurationError("--tls-key and --tls-client-ca say nothing without --tls-cert.",
                                 hint="Give a certificate.")
    try:
        _ = options.memory.for_manager
    except ValueError as error:
        raise ConfigurationError(f"--memory-warning and --memory-critical: {error}.") from None
    is_private = bool(address.unix) or is_loopback(address.host)
    PeerPolicy.parse(options.peers, is_private=is_private)
    if is_private:
        return True
    lacking = [remedy for remedy, has in (
        ("encryption: give a certificate with --tls-cert and --tls-key", bool(tls.cert)),
        ("a token: set DJINN_TOKEN to a secret, or make tokens with `djinn token create NAME` and give --tokens",
         needs_token)) if not has]
    if lacking:
        raise ConfigurationError(f"Other machines could reach {address.host}, and it has no {'; nor '.join(lacking)}.",
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
