"""Tenants: the users of a server."""

from __future__ import annotations

import datetime
import hashlib
import re

import attrs
import msgspec

from djinn.errors import TokenEndedError
from djinn_plugins.server.tenant_limits import Limits, memory_limit

__all__ = ("MAX_IDENTITY_BYTES", "NAME", "AuthenticatedClient", "Tenant", "granted", "is_tenant_name", "session_digest",
           "token_ended", "written")

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z"
"""The pattern of a tenant's name."""
MAX_IDENTITY_BYTES = 64
_NAME = re.compile(NAME)


@attrs.frozen
class Tenant:
    """A user of a server.

    Attributes:
        name: Its name; empty if all clients are one tenant.
        limits: Its limits.
        key: Distinguishes it from a later tenant of the same name with another token.
        weight: Its share of a contended device.
        models: Names or patterns of the gated models that it may use.
        share: The group of tenants that keep equal uploads in memory once; empty if it shares with no other tenant.
    """

    name: str = ""
    limits: Limits = attrs.field(factory=Limits)
    key: str = ""
    weight: float = 1.0
    models: tuple[str, ...] = ()
    share: str = ""


@attrs.frozen
class AuthenticatedClient:
    """A client that an authenticator has admitted.

    Attributes:
        tenant: Its tenant.
        token: Identity of its token, at most `MAX_IDENTITY_BYTES` long, which reveals nothing about the token; empty if
            tokens are not distinguished. The client's sessions end together with the token.
        expires_s: When the token expires, in seconds since 1970; ``None`` if the server need not watch that.
    """

    tenant: Tenant
    token: bytes = b""
    expires_s: float | None = None


def is_tenant_name(name: object) -> bool:
    """Whether a separate tenant can have this name."""
    return isinstance(name, str) and _NAME.match(name) is not None


def session_digest(tenant: str, name: str) -> str:
    """Return what stands for a tenant's named session in a cluster: the same name of another tenant gives another."""
    return hashlib.sha256(f"{tenant}\0{name}".encode("utf-8", "surrogateescape")).hexdigest()[:32]


def granted(own: Limits, defaults: Limits) -> Limits:
    """Combine a tenant's own limits with the server's defaults, which apply where the tenant has none.

    For memory, the lower limit applies: no tenant may use more than the server grants to all.
    """
    given, server = msgspec.structs.asdict(own), msgspec.structs.asdict(defaults)
    return Limits(**{what: given[what] or server[what] for what in server} | {
        "memory_bytes": memory_limit(defaults.memory_bytes, own)})


def token_ended(expired_s: float | None = None) -> TokenEndedError:
    """Return the error for a token that has expired, in seconds since 1970, or, without a time, was revoked."""
    said = "was revoked" if expired_s is None else f"expired at {written(int(expired_s))}"
    return TokenEndedError(f"The token {said}.", hint="Get a new one from the server's operator, who makes it with "
                                                      "`djinn token rotate NAME` or `djinn token create NAME`.")


def written(moment_s: int) -> str:
    """Format a time in seconds since 1970 as UTC."""
    return datetime.datetime.fromtimestamp(moment_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
