"""Options of listeners and of memory managers: values that are read from a command line, without importing PyTorch."""

from __future__ import annotations

import attrs

__all__ = ("CRITICAL", "WARNING", "ListenOptions", "MemoryOptions")

WARNING = 0.80
CRITICAL = 0.95


@attrs.frozen
class ListenOptions:
    """Options for a transport's `listen`."""

    greeting_timeout_s: float = 5.0
    """How long a new connection may take to identify itself."""
    progress_timeout_s: float = 30.0
    """How long a started frame may make no progress."""
    max_body_bytes: int = 16 * 2**30
    """Largest body of one frame."""
    tls_cert: str = ""
    """File with the server's certificate, for encrypted connections."""
    tls_key: str = ""
    """File with its key; empty if the certificate file contains it."""
    tls_client_ca: str = ""
    """File with the authorities that must sign clients' certificates, or these authorities' certificates as PEM; empty
    to require no client certificates.
    """


@attrs.frozen
class MemoryOptions:
    """The limits of a manager.

    Attributes:
        limit_bytes: Most bytes that the values of all sessions may use on the device; 0 for no limit.
        host_bytes: Most bytes that may be moved to the host, including the uploads kept there; 0 for no limit.
        warning: Fraction of the limit at which values are evicted in advance.
        critical: Fraction of the limit at which nothing runs ahead.

    Raises:
        ValueError: The fractions are not in increasing order.
    """

    limit_bytes: int = 0
    host_bytes: int = 0
    warning: float = WARNING
    critical: float = CRITICAL

    def __attrs_post_init__(self) -> None:
        if not 0 < self.warning < self.critical <= 1:
            raise ValueError(f"{self.warning:g} and {self.critical:g} are no tiers: 0 < warning < critical <= 1 has to "
                             "hold")
