"""Tenants: who is let in, and what for."""

from __future__ import annotations

import hmac
import logging
import threading
from typing import Protocol

import attrs
import msgspec

from djinn.errors import ConfigurationError, RefusedError
from djinn_server.limits import Limits
from djinn_server.tokens import Entry, TokenFile

__all__ = ("KnownTenants", "OneTenant", "Tenant", "Tenants")

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


class Tenants(Protocol):
    """Everybody who is let in."""

    def admit(self, token: str) -> Tenant:
        """Return whose token this is.

        Raises:
            RefusedError: It is nobody's.
        """

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return what a tenant is by now; ``None`` if he is none any more."""


@attrs.frozen
class OneTenant:
    """Everybody who knows a token is the same tenant; without a token, everybody is."""

    token: str = attrs.field(repr=False)
    tenant: Tenant

    def admit(self, token: str) -> Tenant:
        """Return the tenant; see `Tenants.admit`."""
        if self.token and not hmac.compare_digest(_bytes(token), _bytes(self.token)):
            raise RefusedError(_said(token), hint=f"{_GIVE}the token the server was started with.")
        return self.tenant

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

    def admit(self, token: str) -> Tenant:
        """Return whose token this is; see `Tenants.admit`."""
        self._refresh()
        tokens = self._tokens
        name = tokens.find(token)
        if name is None:
            raise RefusedError(_said(token), hint=f"{_GIVE}yours; the server's operator makes one with "
                                                  "`djinn token create NAME`.")
        return self._tenant(name, tokens.tenants[name])

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return what a tenant is by now; see `Tenants.current`."""
        self._refresh()
        entry = self._tokens.tenants.get(tenant.name)
        return None if entry is None or entry.digest != tenant.key else self._tenant(tenant.name, entry)

    def _tenant(self, name: str, entry: Entry) -> Tenant:
        own, defaults = msgspec.structs.asdict(entry.limits), msgspec.structs.asdict(self._defaults)
        return Tenant(name, Limits(**{what: own[what] or defaults[what] for what in defaults}), entry.digest,
                      entry.weight)

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


def _said(token: str) -> str:
    return "The token is wrong." if token else "The token is missing."


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogateescape")
