"""An authenticator that keeps every law, and others that do not."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from djinn.errors import RefusedError
from djinn.hookspecs import hookimpl
from djinn_plugins.server.kinds.authenticator import Authenticator
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenants import AuthenticatedClient, Tenant

BROKEN: dict[str, tuple[str, set[str]]] = {
    "lets-all-in": ("authenticator.unknown_refused",
                    {"authenticator.near_misses_refused", "authenticator.token_kept_secret"}),
    "ignores-case": ("authenticator.near_misses_refused", {"authenticator.same_client"}),
    "new-identities": ("authenticator.same_client", set()),
    "no-weight": ("authenticator.client_valid", set()),
    "repeats-the-token": ("authenticator.token_kept_secret", set()),
    "forgets-tenants": ("authenticator.admitted_is_current", set()),
    "forgets-on-renewal": ("authenticator.renewal_keeps_clients", set()),
}
"""Name of each broken authenticator, the law that it breaks, and others that it may break as a consequence."""
TOKENS = {"The-First-Token-Of-Ann": "ann", "The-Second-Token-Of-Bob": "bob"}


class _Authenticator(Authenticator):
    def __init__(self, flaw: str) -> None:
        self._flaw = flaw
        self._tokens = dict(TOKENS)

    def authenticate(self, token: str, *, resumes: bool = False) -> AuthenticatedClient:
        identity = hashlib.blake2b(token.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        for known, name in self._tokens.items():
            pair = [known, token] if self._flaw != "ignores-case" else [known.lower(), token.lower()]
            if hmac.compare_digest(*(text.encode("utf-8", "surrogateescape") for text in pair)):
                if self._flaw == "new-identities":
                    identity = secrets.token_bytes(16)
                if self._flaw == "repeats-the-token":
                    identity = token.encode()[:64]
                return AuthenticatedClient(Tenant(name, weight=0 if self._flaw == "no-weight" else 1.0), identity)
        if self._flaw == "lets-all-in":
            return AuthenticatedClient(Tenant("guest"), identity)
        raise RefusedError("The token is wrong.")

    def current(self, tenant: Tenant) -> Tenant | None:
        return None if self._flaw == "forgets-tenants" else tenant

    def prepare(self, options: ServeOptions) -> Callable[[], None]:
        return self._tokens.clear if self._flaw == "forgets-on-renewal" else dict


class _Factory:
    secret_variables = ()

    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def check(self, options: ServeOptions) -> bool:
        return True

    def open(self, options: ServeOptions) -> Authenticator:
        return _Authenticator(self._flaw)

    def sample(self, folder: Path) -> tuple[ServeOptions, list[str]]:
        return ServeOptions(), list(TOKENS)


@hookimpl
def djinn_register_authenticators(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))
