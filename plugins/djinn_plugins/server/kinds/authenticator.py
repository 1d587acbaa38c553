"""Authenticators: who a client is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from djinn.errors import TokenEndedError
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenants import AuthenticatedClient, Tenant

__all__ = ("Authenticator", "AuthenticatorFactory", "SamplingAuthenticatorFactory")


class Authenticator:
    """Says who a client is. This base class has defaults for all methods but `authenticate`.

    It runs in the gateway, the only process that knows the clients' tokens. The server checks what a client presents
    before it passes it on: text of at most 4,096 characters. It also checks what the authenticator returns, and refuses
    the client if the authenticator raises anything; the log names the exception, but not its text.

    Attributes:
        tenant: The tenant that all clients are, whose worker starts with the server; ``None`` if clients are of many
            tenants, which then take turns on the device.
        is_quick: Whether `authenticate` never waits for anything but a local file, so that the gateway calls it in its
            event loop. Otherwise it calls it in a thread, which takes more of its time.

    Concurrency:
        Any thread.

    Laws:
        authenticator.unknown_refused, authenticator.near_misses_refused, authenticator.same_client,
        authenticator.client_valid, authenticator.token_kept_secret, authenticator.admitted_is_current,
        authenticator.renewal_keeps_clients
    """

    tenant: Tenant | None = None
    is_quick: bool = False

    def authenticate(self, token: str, *, resumes: bool = False) -> AuthenticatedClient:
        """Return who presents a token. Compare secrets in constant time, with `hmac.compare_digest`.

        Args:
            token: What the client has presented; empty if nothing.
            resumes: Whether the client resumes a session.

        Raises:
            RefusedError: The token is unknown. The error must not repeat it.
            TokenEndedError: The token has expired or was revoked.
        """
        raise NotImplementedError

    def why_ended(self, tenant: Tenant, token: bytes) -> TokenEndedError | None:
        """Return the reason why a token is no longer valid; ``None`` if it is. Called often: it must be quick.

        Args:
            tenant: Its tenant.
            token: Its identity; empty for all tokens of the tenant.
        """
        return None

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return a tenant with its current limits; ``None`` if it is no longer a tenant. Called often: be quick."""
        return tenant

    def prepare(self, options: ServeOptions) -> Callable[[], None]:
        """Prepare to use changed options, on SIGHUP.

        Returns:
            A function that starts to use them, called once everything else has been prepared, too. It must not raise.

        Raises:
            ConfigurationError: They cannot be used; the previous ones then stay in use.
        """
        return _nothing


class AuthenticatorFactory(Protocol):
    """Opens an authenticator; what plugins register."""

    name: str
    """Name in the configuration."""
    secret_variables: tuple[str, ...]
    """Environment variables with secrets, which workers must not see."""

    def check(self, options: ServeOptions) -> bool:
        """Check the options, before anything starts and on SIGHUP. It reads no secrets.

        Returns:
            Whether clients need a token. If they do not, other machines must not be able to connect.

        Raises:
            ConfigurationError: They cannot be used.
        """

    def open(self, options: ServeOptions) -> Authenticator:
        """Open the authenticator, in the gateway, after it has forked the process that forks workers.

        Raises:
            ConfigurationError: It cannot be opened.
        """


@runtime_checkable
class SamplingAuthenticatorFactory(Protocol):
    """An `AuthenticatorFactory` that can make tokens for tests of its laws."""

    def sample(self, folder: Path) -> tuple[ServeOptions, list[str]]:
        """Return options under which the authenticator admits clients, and some of the tokens that it admits.

        Args:
            folder: An empty folder, for files that it needs.
        """


def _nothing() -> None:
    """Do nothing: no options of the authenticator can change."""
