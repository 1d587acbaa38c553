"""Tenants: who is let in, and what for."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
import time
from typing import Protocol

import attrs
import msgspec

from djinn.errors import ConfigurationError, RefusedError, TokenEndedError
from djinn_server.expiry import written
from djinn_server.limits import Limits, memory_limit
from djinn_server.tokens import Entry, Secret, TokenFile

__all__ = ("Admission", "KnownTenants", "NoWorkerError", "OneTenant", "Tenant", "Tenants", "granted", "token_ended")

_GIVE = "Set DJINN_TOKEN, or djinn.init(token=...), to "
_log = logging.getLogger("djinn.server")


@attrs.frozen
class Tenant:
    """Somebody who uses a server.

    Attributes:
        name: Empty where everybody is one.
        limits: What he may use.
        key: Another one for another token of the same name.
        weight: His part of a device that others want too.
    """

    name: str = ""
    limits: Limits = attrs.field(factory=Limits)
    key: str = ""
    weight: float = 1.0


@attrs.frozen
class Admission:
    """Somebody who was let in.

    Attributes:
        tenant: Who that is.
        token: Identity of the token; empty where none is told from others.
    """

    tenant: Tenant
    token: bytes = b""


class NoWorkerError(RefusedError):
    """A tenant has no worker that serves.

    Attributes:
        is_starting: Whether a process is about to become one.
    """

    # Clients know it as what it is a kind of.
    code = RefusedError.code
    is_starting = False


class Tenants(Protocol):
    """Everybody who is let in."""

    def admit(self, token: str, *, resumes: bool = False) -> Admission:
        """Return whose token this is.

        Args:
            token: What a client has presented.
            resumes: Whether it takes a session up that it has.

        Raises:
            RefusedError: It is nobody's.
            TokenEndedError: It has expired.
        """

    def why_ended(self, tenant: Tenant, token: bytes) -> TokenEndedError | None:
        """Say why a token lets nobody in any more; ``None`` if it does.

        Args:
            tenant: Whose it was.
            token: Its identity; empty for all of the tenant's.
        """

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return what a tenant is by now; ``None`` if he is none any more."""


class OneTenant:
    """Everybody who knows a token is the same tenant; without a token, everybody is.

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
        """Let in by another token, and grant other limits, from now on. Sessions that there are stay."""
        if token != self._token:
            # A session that was let in by it is taken up by it when its connection breaks.
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
        """Nothing has ended; see `Tenants.why_ended`."""

    def current(self, tenant: Tenant) -> Tenant:
        """Return the tenant, who stays."""
        return self.tenant


class KnownTenants:
    """Those who have a token in a file. A change of the file counts from when it is made.

    Args:
        file: The file.
        defaults: What a tenant may use as far as his token does not say.

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
        """Read the file again now, whether it seems to have changed or not.

        Raises:
            ConfigurationError: The file cannot be used; then all stays as it was.
        """
        with self._lock:
            self._tokens = self._file.read()

    def renew(self, defaults: Limits) -> None:
        """Grant other limits to those whose tokens do not say otherwise, from now on."""
        self._defaults = defaults

    def admit(self, token: str, *, resumes: bool = False) -> Admission:
        """Return whose token this is; see `Tenants.admit`."""
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
        """Say why a token lets nobody in any more; see `Tenants.why_ended`."""
        entry = self._tokens.tenants.get(tenant.name)
        if entry is None or entry.key != tenant.key:
            return token_ended()
        secrets = [secret for secret in entry.secrets if not token or secret.identity == token]
        if any(secret.is_valid(time.time()) for secret in secrets):
            return None
        return token_ended(*secrets[:1])

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return what a tenant is by now; see `Tenants.current`."""
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
                # Nobody is let in by it who was not before; and nobody loses his session to a slip of the operator.
                _log.error("the tokens stay as they were: %s", error)  # no bug
            else:
                _log.info("%s: %d tokens", self._file.path, len(self._tokens.tenants))


def granted(own: Limits, defaults: Limits) -> Limits:
    """Return what a tenant may use: what his token says, and the server where that says nothing.

    Of memory he may use what both allow: nobody may have more of it than the server grants to everybody.
    """
    given, server = msgspec.structs.asdict(own), msgspec.structs.asdict(defaults)
    return Limits(**{what: given[what] or server[what] for what in server} | {
        "memory_bytes": memory_limit(defaults.memory_bytes, own)})


def token_ended(secret: Secret | None = None) -> TokenEndedError:
    """Say that a token has ended: it expired, or, without a token, was revoked."""
    said = "was revoked" if secret is None else f"expired at {written(secret.expires)}"
    return TokenEndedError(f"The token {said}.", hint="Get a new one from the server's operator, who makes it with "
                                                      "`djinn token rotate NAME` or `djinn token create NAME`.")


def _digest(token: str) -> bytes:
    return hashlib.sha256(_bytes(token)).digest()


def _said(token: str) -> str:
    return "The token is wrong." if token else "The token is missing."


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")
