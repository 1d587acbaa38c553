"""The two ways in which the authenticator ``tokens`` admits clients."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs

from djinn.errors import ConfigurationError, RefusedError, TokenEndedError
from djinn_plugins.server.kinds.authenticator import Authenticator
from djinn_plugins.server.options import ServeOptions, TokenOptions
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenants import AuthenticatedClient, Tenant, granted, token_ended
from djinn_plugins.server.tokens.tokens import TokenFile, TokenRecord, Tokens

__all__ = ("SharedToken", "TokenAuthentication", "TokenFileTenants")

_GIVE = "Set DJINN_TOKEN, or djinn.init(token=...), to "
_log = logging.getLogger("djinn.server")


class TokenAuthentication:
    """The authenticator ``tokens``; see `djinn_plugins.server.kinds.authenticator.AuthenticatorFactory`."""

    name = "tokens"
    secret_variables: tuple[str, ...] = ("DJINN_TOKEN",)

    def check(self, options: ServeOptions) -> bool:
        """Check the options ``--token`` and ``--tokens``, and return whether there is one."""
        token, file = options.tokens.token, options.tokens.file
        if file and token:
            raise ConfigurationError("There are --tokens, and a token for everybody (--token or DJINN_TOKEN).",
                                     hint="Use one of the two.")
        if file and not Path(file).exists():
            raise ConfigurationError(f"There is no file {file}.",
                                     hint=f"Make a token: djinn token create NAME --tokens {file}")
        return bool(token or file)

    def open(self, options: ServeOptions) -> Authenticator:
        """Open the file of tokens, if there is one."""
        if options.tokens.file:
            return TokenFileTenants(TokenFile(Path(options.tokens.file)), options.limits)
        return SharedToken(options.tokens.token, Tenant("", options.limits))

    def sample(self, folder: Path) -> tuple[ServeOptions, list[str]]:
        """Make tokens; see `djinn_plugins.server.kinds.authenticator.SamplingAuthenticatorFactory`."""
        file = TokenFile(folder / "tokens.json")
        made = [file.create("ann"), file.create("bob", weight=2.0)]
        return ServeOptions(tokens=TokenOptions(file=str(file.path))), made


class SharedToken(Authenticator):
    """All clients are the same tenant; if there is a token, they must present it.

    Args:
        token: The token; empty for none.
        tenant: The tenant.

    Concurrency:
        Any thread.
    """

    is_quick = True

    def __init__(self, token: str, tenant: Tenant) -> None:
        self.tenant: Tenant = tenant
        self._token = token
        self._earlier: frozenset[bytes] = frozenset()

    def prepare(self, options: ServeOptions) -> Callable[[], None]:
        """Change the token and the limits; see `Authenticator.prepare`. Existing sessions continue."""
        return partial(self._renew, options.tokens.token, options.limits)

    def _renew(self, token: str, limits: Limits) -> None:
        if token != self._token:
            # Sessions that were admitted with the old token are also resumed with it.
            self._earlier |= {_digest(self._token)}
            self._token = token
        self.tenant = attrs.evolve(self.tenant, limits=limits)

    def authenticate(self, token: str, *, resumes: bool = False) -> AuthenticatedClient:
        """Return the tenant; see `Authenticator.authenticate`."""
        wanted = self._token
        is_known = not wanted or hmac.compare_digest(_bytes(token), _bytes(wanted))
        if not is_known and not (resumes and _digest(token) in self._earlier):
            raise RefusedError(_said(token), hint=f"{_GIVE}the token the server was started with.")
        return AuthenticatedClient(self.tenant)

    def current(self, tenant: Tenant) -> Tenant:
        """Return the tenant, with its current limits."""
        return self.tenant


class TokenFileTenants(Authenticator):
    """The tenants of a token file. Changes of the file take effect at once.

    Args:
        file: The file.
        defaults: Limits that apply where a tenant's record sets none.

    Raises:
        ConfigurationError: The file cannot be used.

    Concurrency:
        Any thread.
    """

    is_quick = True

    def __init__(self, file: TokenFile, defaults: Limits) -> None:
        self._file = file
        self._defaults = defaults
        self._lock = threading.Lock()
        self._state = file.state()
        self._tokens = file.read()

    def prepare(self, options: ServeOptions) -> Callable[[], None]:
        """Read the file again, even if it does not seem to have changed; see `Authenticator.prepare`."""
        return partial(self._renew, self._file.read(), options.limits)

    def _renew(self, tokens: Tokens, defaults: Limits) -> None:
        with self._lock:
            self._tokens, self._defaults = tokens, defaults

    def authenticate(self, token: str, *, resumes: bool = False) -> AuthenticatedClient:
        """Return the tenant of a token; see `Authenticator.authenticate`."""
        self._refresh()
        tokens = self._tokens
        found = tokens.find(token)
        if found is None:
            raise RefusedError(_said(token), hint=f"{_GIVE}yours; the server's operator makes one with "
                                                  "`djinn token create NAME`.")
        name, secret = found
        if not secret.is_valid(time.time()):
            raise token_ended(secret.expires)
        return AuthenticatedClient(self._tenant(name, tokens.tenants[name]), secret.identity)

    def why_ended(self, tenant: Tenant, token: bytes) -> TokenEndedError | None:
        """Return the reason why a token is no longer valid; see `Authenticator.why_ended`."""
        entry = self._tokens.tenants.get(tenant.name)
        if entry is None or entry.key != tenant.key:
            return token_ended()
        secrets = [secret for secret in entry.secrets if not token or secret.identity == token]
        if any(secret.is_valid(time.time()) for secret in secrets):
            return None
        return token_ended(*(secret.expires for secret in secrets[:1]))

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return a tenant's current state; see `Authenticator.current`."""
        self._refresh()
        entry = self._tokens.tenants.get(tenant.name)
        if entry is None or self.why_ended(tenant, b"") is not None:
            return None
        return self._tenant(tenant.name, entry)

    def _tenant(self, name: str, entry: TokenRecord) -> Tenant:
        return Tenant(name, granted(entry.limits, self._defaults), entry.key, entry.weight, entry.models,
                      entry.share)

    def _refresh(self) -> None:
        with self._lock:
            state = self._file.state()
            if state == self._state:
                return
            self._state = state
            try:
                self._tokens = self._file.read()
            except ConfigurationError as error:
                # An invalid file admits no new tenants, and a mistake of the operator ends no sessions.
                _log.error("the tokens stay as they were: %s", error)  # no bug
            else:
                _log.info("%s: %d tokens", self._file.path, len(self._tokens.tenants))


def _digest(token: str) -> bytes:
    return hashlib.sha256(_bytes(token)).digest()


def _said(token: str) -> str:
    return "The token is wrong." if token else "The token is missing."


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")
