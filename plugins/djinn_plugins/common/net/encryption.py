"""TLS of endpoints beside the transports."""

from __future__ import annotations

import ssl

from djinn.errors import ConfigurationError

__all__ = ("server_context",)


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Return the TLS 1.3 context of a server.

    Args:
        cert: PEM file with the certificate and its chain.
        key: PEM file with the certificate's key; empty if the other file has it.

    Raises:
        ConfigurationError: The files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key or None, password=lambda: b"")
    except OSError as error:
        raise ConfigurationError(f"The certificate and key of {cert} cannot be used: {error.strerror or error}.",
                                 hint="Give PEM files that this user can read, and the certificate's key without a "
                                      "password.") from None
    return context
