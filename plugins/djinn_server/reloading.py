"""Reloading the configuration while sessions run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from djinn_lib_service.kinds.transport import Listener, ListenOptions

from djinn.errors import ConfigurationError
from djinn_server.control import Renew
from djinn_server.supervisor import Supervisor
from djinn_server.tenants import KnownTenants, OneTenant

if TYPE_CHECKING:
    from djinn_server.command import Offer

__all__ = ("Reloading", "RenewableListener")

_log = logging.getLogger("djinn.server")


@runtime_checkable
class RenewableListener(Protocol):
    """A `Listener` whose certificate can be replaced while its connections stay open."""

    def renew(self, options: ListenOptions) -> None:
        """Use other certificates for new connections; open connections are not affected.

        Args:
            options: As for `ListeningTransport.listen`; only the certificate options are used.

        Raises:
            ConfigurationError: They cannot be used. The previous certificates then stay in use.
        """


class Reloading:
    """Replaces a server's configuration, completely or not at all.

    Args:
        offer: The server's current configuration.
        read: Reads the configuration again; returns it, and the names of changed options that need a restart.
        check: Raises if the configuration contradicts itself.
        listener: Where clients connect.
        tenants: The tenants that are admitted.
        supervisor: Manages the workers.
        apply: Applies `offer` and the tenants' current limits to the workers.

    Attributes:
        offer: The server's current configuration.

    Concurrency:
        One thread calls `reload`; any reads `offer`.
    """

    def __init__(self, offer: Offer, read: Callable[[], tuple[Offer, list[str]]], check: Callable[[Offer], object],
                 listener: Listener, tenants: KnownTenants | OneTenant, supervisor: Supervisor,
                 apply: Callable[[], None]) -> None:
        self.offer = offer
        self._read = read
        self._check = check
        self._listener = listener
        self._tenants = tenants
        self._supervisor = supervisor
        self._apply = apply

    def reload(self) -> None:
        """Read the configuration again and apply it. No session ends.

        Raises:
            ConfigurationError: The configuration is invalid; says why. The previous one then stays in use.
        """
        offer, left = self._read()
        self._check(offer)
        if bool(offer.tls_cert) != bool(self.offer.tls_cert):
            raise ConfigurationError("tls-cert cannot come or go while the server runs: its address would be another.",
                                     hint="Restart the server.")
        certificate = _read_certificate(offer) if offer.tls_cert else b""
        authorities = _read(offer.tls_client_ca).decode("ascii", "replace") if offer.tls_client_ca else ""
        if isinstance(self._tenants, KnownTenants):
            # Steps that can fail come before steps that cannot; renewing the certificates is the last step that can.
            self._tenants.check()
        if isinstance(self._listener, RenewableListener):
            self._listener.renew(ListenOptions(tls_cert=offer.tls_cert, tls_key=offer.tls_key,
                                               tls_client_ca=offer.tls_client_ca))
        for name in left:
            _log.warning("%s is another in the file, which takes a restart: it stays as it was", name)
        self.offer = offer
        if isinstance(self._tenants, KnownTenants):
            self._tenants.renew(offer.limits)
        else:
            self._tenants.renew(offer.token, offer.limits)
        for worker in self._supervisor.renew():
            if certificate:
                descriptor = _opened(worker.pair.encode() or certificate)
                try:
                    worker.tell(Renew(authorities), descriptor)
                finally:
                    os.close(descriptor)
        self._apply()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None


def _read_certificate(offer: Offer) -> bytes:
    """Return the certificate, its chain and its key, joined into one PEM file."""
    return b"\n".join(_read(path) for path in (offer.tls_cert, offer.tls_key) if path)


def _opened(content: bytes) -> int:
    """Write content to a nameless file, which is deleted with its last descriptor; return a descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("djinn-certificate")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)  # noqa: PTH108  # by the name that `mkstemp` gave
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor
