"""Tenants: who is admitted, and with which limits."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from typing import Protocol

import attrs
import msgspec
from djinn_lib_server.limits import Limits, memory_limit

from djinn.errors import ConfigurationError, RefusedError, TokenEndedError
from djinn_server.expiry import written
from djinn_server.tokens import Entry, Secret, TokenFile

__all__ = ("Admission", "KnownTenants", "NoWorkerError", "OneTenant", "Tenant", "Tenants", "granted", "token_ended")

_GIVE = "Set DJINN_TOKEN, or djinn.init(token=...), to "
_log = logging.getLogger("djinn.server")


@attrs.frozen
class Tenant:
    """A user of a server.

    Attributes:
        name: Its name; empty if all clients are one tenant.
        limits: Its limits.
        key: Distinguishes it from a later tenant of the same name with another token.
        weight: Its share of a contended device.
    """

    name: str = ""
    limits: Limits = attrs.field(factory=Limits)
    key: str = ""
    weight: float = 1.0


@attrs.frozen
class Admission:
    """An admitted client.

    Attributes:
        tenant: Its tenant.
        token: Identity of its token; empty if tokens are not distinguished.
    """

    tenant: Tenant
    token: bytes = b""


class NoWorkerError(RefusedError):
    """A tenant has no serving worker.

    Attributes:
        is_starting: Whether one is starting.
    """

    # Clients know only the base class.
    code = RefusedError.code
    is_starting = False


class Tenants(Protocol):
    """All tenants that are admitted."""

    def admit(self, token: str, *, resumes: bool = False) -> Admission:
        """Return the tenant of a token.

        Args:
            token: The token that a client has presented.
            resumes: Whether the client resumes a session.

        Raises:
            RefusedError: The token is unknown.
            TokenEndedError: The token has expired.
        """

    def why_ended(self, tenant: Tenant, token: bytes) -> TokenEndedError | None:
        """Return the reason why a token is no longer valid; ``None`` if it is.

        Args:
            tenant: Its tenant.
            token: Its identity; empty for all tokens of the tenant.
        """

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return a tenant's current state; ``None`` if it is no longer a tenant."""


class OneTenant:
    """All clients are the same tenant; if there is a token, they must present it.

    Args:
        token: The token; empty for none.
        tenant: The tenant.

    Attributes:
        tenant: As given.

    Concurrency:
        Any thread.
    """

    def __init__(self, token: str, tenant: Tenant) -> None:
        self.tenant = tenant
        self._token = token
        self._earlier: frozenset[bytes] = frozenset()

    def renew(self, token: str, limits: Limits) -> None:
        """Change the token and the limits. Existing sessions continue."""
        if token != self._token:
            # Sessions that were admitted with the old token are also resumed with it.
            self._earlier |= {_digest(self._token)}
            self._token = token
        self.tenant = attrs.evolve(self.tenant, limits=limits)

    def admit(self, token: str, *, resumes: bool = False) -> Admission:
        """Return the tenant; see `Tenants.admit`."""
        wanted = self._token
        is_known = not wanted or hmac.compare_digest(_bytes(token), _bytes(wanted))
        if not is_known and not (resumes and _digest(token) in self._earlier):
            raise RefusedError(_said(token), hint=f"{_GIVE}the token the server was started with.")
        return Admission(self.tenant)

    def why_ended(self, tenant: Tenant, token: bytes) -> None:
        """Return ``None``: the token never ends; see `Tenants.why_ended`."""

    def current(self, tenant: Tenant) -> Tenant:
        """Return the tenant, which never changes."""
        return self.tenant


class KnownTenants:
    """The tenants of a token file. Changes of the file take effect at once.

    Args:
        file: The file.
        defaults: Limits that apply where a tenant's record sets none.

    Raises:
        ConfigurationError: The file cannot be used.

    Concurrency:
        Any thread.
    """

    def __init__(self, file: TokenFile, defaults: Limits) -> None:
        self._file = file
        self._defaults = defaults
        self._lock = threading.Lock()
        self._state = file.state()
        self._tokens = file.read()

    def check(self) -> None:
        """Read the file again, even if it does not seem to have changed.

        Raises:
            ConfigurationError: The file cannot be used; the previous content then stays in use.
        """
        with self._lock:
            self._tokens = self._file.read()

    def renew(self, defaults: Limits) -> None:
        """Change the limits that apply where a tenant's record sets none."""
        self._defaults = defaults

    def admit(self, token: str, *, resumes: bool = False) -> Admission:
        """Return the tenant of a token; see `Tenants.admit`."""
        self._refresh()
        tokens = self._tokens
        found = tokens.find(token)
        if found is None:
            raise RefusedError(_said(token), hint=f"{_GIVE}yours; the server's operator makes one with "
                                                  "`djinn token create NAME`.")
        name, secret = found
        if not secret.is_valid(time.time()):
            raise token_ended(secret)
        return Admission(self._tenant(name, tokens.tenants[name]), secret.identity)

    def why_ended(self, tenant: Tenant, token: bytes) -> TokenEndedError | None:
        """Return the reason why a token is no longer valid; see `Tenants.why_ended`."""
        entry = self._tokens.tenants.get(tenant.name)
        if entry is None or entry.key != tenant.key:
            return token_ended()
        secrets = [secret for secret in entry.secrets if not token or secret.identity == token]
        if any(secret.is_valid(time.time()) for secret in secrets):
            return None
        return token_ended(*secrets[:1])

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return a tenant's current state; see `Tenants.current`."""
        self._refresh()
        entry = self._tokens.tenants.get(tenant.name)
        if entry is None or self.why_ended(tenant, b"") is not None:
            return None
        return self._tenant(tenant.name, entry)

    def _tenant(self, name: str, entry: Entry) -> Tenant:
        return Tenant(name, granted(entry.limits, self._defaults), entry.key, entry.weight)

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


def granted(own: Limits, defaults: Limits) -> Limits:
    """Combine a tenant's own limits with the server's defaults, which apply where the tenant's record sets none.

    For memory, the lower limit applies: no tenant may use more than the server grants to all.
    """
    given, server = msgspec.structs.asdict(own), msgspec.structs.asdict(defaults)
    return Limits(**{what: given[what] or server[what] for what in server} | {
        "memory_bytes": memory_limit(defaults.memory_bytes, own)})


def token_ended(secret: Secret | None = None) -> TokenEndedError:
    """Return the error for a token that has expired, or, without a token, for one that was revoked."""
    said = "was revoked" if secret is None else f"expired at {written(secret.expires)}"
    return TokenEndedError(f"The token {said}.", hint="Get a new one from the server's operator, who makes it with "
                                                      "`djinn token rotate NAME` or `djinn token create NAME`.")


def _digest(token: str) -> bytes:
    return hashlib.sha256(_bytes(token)).digest()


def _said(token: str) -> str:
    return "The token is wrong." if token else "The token is missing."


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")
