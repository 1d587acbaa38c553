"""Checks of a server's options that concern several of them."""

from __future__ import annotations

import re
import socket

from djinn.errors import ConfigurationError
from djinn_plugins.common.net.exposure import check_exposure, is_loopback
from djinn_plugins.server.options import LOOPBACK, ServeOptions
from djinn_plugins.server.peers import PeerPolicy

__all__ = ("check_options",)


_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+")


def check_options(options: ServeOptions, *, needs_token: bool, encrypts: bool = False) -> bool:
    """Reject contradictory or unsafe options.

    Args:
        options: The options.
        needs_token: Whether the authenticator requires a token.
        encrypts: Whether the transport of ``--listen`` declares that it encrypts.

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
    if address.listen:
        if address.unix or address.host != LOOPBACK or address.port:
            raise ConfigurationError("--listen cannot be used with --unix, --host or --port: a server listens on one "
                                     "address.")
        if not _ADDRESS.fullmatch(address.listen):
            raise ConfigurationError(f"--listen {address.listen!r} is no address.", hint="Write SCHEME://HOST:PORT.")
        if tls.cert and not encrypts:
            raise ConfigurationError(f"The transport of {options.scheme}:// does not declare that it encrypts, so "
                                     "--tls-cert would have no effect.", hint="Listen on tls://HOST:PORT.")
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
    is_private = address.is_path or is_loopback(address.reachable_at)
    PeerPolicy.parse(options.peers, is_private=is_private)
    return is_private or check_exposure(
        address.reachable_at, is_encrypted=bool(tls.cert), needs_token=needs_token)
