"""Calls the authenticator, which a plugin provides: checks what it is given and what it answers."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from djinn.errors import DjinnError, RefusedError, TokenEndedError
from djinn_plugins.server.kinds.authenticator import Authenticator
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenant_limits import Limits
from djinn_plugins.server.tenants import MAX_IDENTITY_BYTES, AuthenticatedClient, Tenant, is_tenant_name, token_ended

__all__ = ("MAX_TOKEN_CHARACTERS", "Authentication", "NoWorkerError")

MAX_TOKEN_CHARACTERS = 4096
"""Longest token that an authenticator has to examine; the protocol allows no longer ones, either."""
_MIN_SECRET_CHARACTERS = 8
_MAX_KEY_CHARACTERS = 1024
_Answer = TypeVar("_Answer")
_log = logging.getLogger("djinn.server")


class NoWorkerError(RefusedError):
    """A tenant has no serving worker.

    Attributes:
        is_starting: Whether one is starting.
    """

    # Clients know only the base class.
    code = RefusedError.code
    is_starting = False


class Authentication:
    """Guards an authenticator: one that raises, or answers nonsense, admits no client and ends no session.

    Args:
        authenticator: The authenticator.

    Attributes:
        tenant: The tenant that all clients are; ``None`` if they are of many.

    Concurrency:
        Any thread.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        """Methods whose last call failed: a check that runs several times a second is logged once."""

    @property
    def tenant(self) -> Tenant | None:
        """The tenant that all clients are."""
        return self._authenticator.tenant

    @property
    def is_quick(self) -> bool:
        """Whether `authenticate` may be called in an event loop."""
        return self._authenticator.is_quick is True

    def authenticate(self, token: str, *, resumes: bool = False) -> AuthenticatedClient:
        """Return the client of a token; see `djinn_plugins.server.kinds.authenticator.Authenticator.authenticate`.

        Raises:
            RefusedError, TokenEndedError: The client is not admitted.
        """
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise RefusedError("The token is too long.", hint=f"Tokens have up to {MAX_TOKEN_CHARACTERS} characters.")
        try:
            client = self._authenticator.authenticate(token, resumes=resumes)
            self._check(client)
        except DjinnError as error:
            if not isinstance(error, (RefusedError, TokenEndedError)) or _repeats(error, token):
                raise self._refused("authenticate", error) from None
            raise
        except Exception as error:  # noqa: BLE001  # whatever a plugin raises, the client is refused
            raise self._refused("authenticate", error) from None
        if client.expires_s is not None and client.expires_s <= time.time():
            raise token_ended(client.expires_s)
        return client

    def check_current(self, client: AuthenticatedClient) -> None:
        """Check that a client's token has not ended since it was presented.

        Raises:
            TokenEndedError: It has ended.
            RefusedError: The authenticator cannot say.
        """
        if client.expires_s is not None and client.expires_s <= time.time():
            raise token_ended(client.expires_s)
        try:
            why = self._authenticator.why_ended(client.tenant, client.token)
        except Exception as error:  # noqa: BLE001  # as above
            raise self._refused("why_ended", error) from None
        if why is not None:
            raise why

    def why_ended(self, tenant: Tenant, token: bytes) -> TokenEndedError | None:
        """Return the reason why a token is no longer valid. An authenticator that fails ends no session."""
        return self._watched("why_ended", lambda: self._authenticator.why_ended(tenant, token), None)

    def current(self, tenant: Tenant) -> Tenant | None:
        """Return a tenant with its current limits; ``None`` if it has ended. One that fails changes nothing."""
        def ask() -> Tenant | None:
            found = self._authenticator.current(tenant)
            if found is not None:
                self._check(AuthenticatedClient(found))
                if found.name != tenant.name:
                    raise ValueError("another tenant")
            return found

        return self._watched("current", ask, tenant)

    def prepare(self, options: ServeOptions) -> Callable[[], None]:
        """Prepare to use changed options; see `djinn_plugins.server.kinds.authenticator.Authenticator.prepare`."""
        return self._authenticator.prepare(options)

    def _check(self, client: Any) -> None:
        """Check what the authenticator has answered.

        Raises:
            TypeError, ValueError: It is not what it should be.
        """
        if not isinstance(client, AuthenticatedClient) or not isinstance(client.tenant, Tenant):
            raise TypeError("no AuthenticatedClient with a Tenant")
        tenant: Any = client.tenant
        token: Any = client.token
        if not (tenant.name == "" if self.tenant is not None else is_tenant_name(tenant.name)):
            raise ValueError("no name of a tenant")
        if not isinstance(tenant.limits, Limits):
            raise TypeError("no limits")
        if not isinstance(tenant.key, str) or len(tenant.key) > _MAX_KEY_CHARACTERS:
            raise TypeError("no key")
        if not 0 < tenant.weight < math.inf:
            raise ValueError("no weight")
        if not isinstance(tenant.models, tuple) or not all(isinstance(name, str) for name in tenant.models):
            raise TypeError("no names of models")
        if not isinstance(token, bytes) or len(token) > MAX_IDENTITY_BYTES:
            raise ValueError("no identity of a token")
        if client.expires_s is not None:
            float(client.expires_s)

    def _refused(self, method: str, error: Exception) -> RefusedError:
        _report(method, error)
        return RefusedError("The server cannot check this client at the moment.",
                            hint="Try again later; the server's log says why.")

    def _watched(self, method: str, ask: Callable[[], _Answer | None], otherwise: _Answer | None
                 ) -> _Answer | None:
        try:
            found = ask()
        except Exception as error:  # noqa: BLE001  # as above
            with self._lock:
                is_new = method not in self._failing
                self._failing.add(method)
            if is_new:
                _report(method, error)
            return otherwise
        with self._lock:
            self._failing.discard(method)
        return found


def _report(method: str, error: Exception) -> None:
    """Log where an exception was raised. Its text is left out, since it may contain a token."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
    _log.error("the authenticator failed in %s: %s%s", method, type(error).__name__, where)  # no bug


def _repeats(error: DjinnError, token: str) -> bool:
    """Whether an error's text repeats a token. A short one may be a word of the text by chance, such as "wrong"."""
    return len(token) >= _MIN_SECRET_CHARACTERS and token in str(error)
