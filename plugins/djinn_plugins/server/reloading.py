"""Reloading the configuration while sessions run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import anyio.to_thread
import attrs

from djinn.errors import ConfigurationError
from djinn_plugins.common.kinds.transport import Listener
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.server.authentication import Authentication
from djinn_plugins.server.control import Renew
from djinn_plugins.server.options import ServeOptions, TlsOptions
from djinn_plugins.server.supervisor import Supervisor

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


@attrs.frozen
class _Renewal:
    """Files of TLS that were read again."""

    certificate: bytes
    authorities: str


class Reloading:
    """Replaces a server's configuration, completely or not at all.

    Args:
        options: The server's current options.
        read: Reads the options again; returns them, and the names of changed options that need a restart.
        check: Raises if the options contradict each other or are unsafe.
        listener: Where clients connect.
        authentication: Says who a client is.
        supervisor: Manages the workers.
        apply: Applies the options and the tenants' current limits to what runs.

    Attributes:
        options: The server's current options.

    Concurrency:
        One task of the event loop calls `reload`; any thread reads `options`.
    """

    def __init__(self, options: ServeOptions, read: Callable[[], tuple[ServeOptions, list[str]]],
                 check: Callable[[ServeOptions], object], listener: Listener, authentication: Authentication,
                 supervisor: Supervisor, apply: Callable[[ServeOptions], Awaitable[None]]) -> None:
        self.options = options
        self._read = read
        self._check = check
        self._listener = listener
        self._authentication = authentication
        self._supervisor = supervisor
        self._apply = apply

    async def reload(self) -> None:
        """Read the configuration again and apply it. No session ends.

        Raises:
            ConfigurationError: The configuration is invalid; says why. The previous one then stays in use.
        """
        options, renewal, use = await anyio.to_thread.run_sync(self._prepare)
        self.options = options
        use()
        for worker in self._supervisor.renew(options):
            if renewal is not None:
                descriptor = _opened(worker.pair.encode() or renewal.certificate)
                try:
                    await worker.tell(Renew(renewal.authorities), descriptor)
                finally:
                    os.close(descriptor)
        await self._apply(options)

    def _prepare(self) -> tuple[ServeOptions, _Renewal | None, Callable[[], None]]:
        """Read the configuration, and prepare to use it: everything that can fail."""
        options, left = self._read()
        self._check(options)
        tls = options.tls
        if bool(tls.cert) != bool(self.options.tls.cert):
            raise ConfigurationError("tls-cert cannot come or go while the server runs: its address would be another.",
                                     hint="Restart the server.")
        certificate = _read_certificate(tls) if tls.cert else b""
        authorities = _read(tls.client_ca).decode("ascii", "replace") if tls.client_ca else ""
        # Steps that can fail come before steps that cannot; renewing the certificates is the last step that can.
        use = self._authentication.prepare(options)
        if isinstance(self._listener, RenewableListener):
            self._listener.renew(tls.for_listening)
        for name in left:
            _log.warning("%s is another in the file, which takes a restart: it stays as it was", name)
        return options, _Renewal(certificate, authorities) if certificate else None, use


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None


def _read_certificate(tls: TlsOptions) -> bytes:
    """Return the certificate, its chain and its key, joined into one PEM file."""
    return b"\n".join(_read(path) for path in (tls.cert, tls.key) if path)


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
