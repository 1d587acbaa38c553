"""Calls the admission policy, which a plugin provides: one that fails keeps neither devices nor the gateway busy."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from djinn.errors import LimitError, RefusedError, ServerDrainingError
from djinn_plugins.server.kinds.admission import AdmissionPolicy, ServerLoad, TurnOrder
from djinn_plugins.server.tenants import Tenant

__all__ = ("GuardedAdmission", "GuardedOrder")

_log = logging.getLogger("djinn.server")


class GuardedAdmission(AdmissionPolicy):
    """Guards a policy: its errors refuse the session.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self.is_quick = policy.is_quick is True

    def admit(self, tenant: Tenant, load: ServerLoad) -> None:
        """Admit a new session; see `djinn_plugins.server.kinds.admission.AdmissionPolicy.admit`.

        Raises:
            LimitError, RefusedError: The session may not begin.
        """
        try:
            self._policy.admit(tenant, load)
        except (LimitError, RefusedError, ServerDrainingError):
            raise
        except Exception as error:
            _log.exception("the admission policy failed in admit")
            raise RefusedError("The server cannot admit sessions at the moment.",
                               hint="Try again later; the server's log says why.", retry_after_s=1.0) from error

    def order_of(self, device: str) -> TurnOrder:
        """Return a new order of turns for a device."""
        return GuardedOrder(self._policy.order_of(device))


class GuardedOrder(TurnOrder):
    """Guards an order of turns: a call that raises is skipped, and a rank that is no finite number counts as 0.

    Args:
        order: The order.
    """

    def __init__(self, order: TurnOrder) -> None:
        self._order = order
        self._failed: set[str] = set()
        """Methods that have failed, each of which is logged once."""

    def join(self, tenant: str, weight: float) -> None:
        """Add a tenant."""
        self._call("join", lambda: self._order.join(tenant, weight))

    def reweigh(self, tenant: str, weight: float) -> None:
        """Change a tenant's weight."""
        self._call("reweigh", lambda: self._order.reweigh(tenant, weight))

    def leave(self, tenant: str) -> None:
        """Remove a tenant."""
        self._call("leave", lambda: self._order.leave(tenant))

    def request(self, tenant: str) -> None:
        """Note that a tenant begins to wait."""
        self._call("request", lambda: self._order.request(tenant))

    def grant(self, tenant: str) -> None:
        """Note that a tenant gets a turn."""
        self._call("grant", lambda: self._order.grant(tenant))

    def charge(self, tenants: Sequence[str], passed_s: float, *, contended: bool) -> None:
        """Charge the tenants that have turns."""
        self._call("charge", lambda: self._order.charge(tenants, passed_s, contended=contended))

    def finish(self, tenant: str) -> None:
        """Note that a turn has ended."""
        self._call("finish", lambda: self._order.finish(tenant))

    def idle(self) -> None:
        """Note that all tenants are idle."""
        self._call("idle", self._order.idle)

    def rank(self, tenant: str) -> float:
        """Return a tenant's rank."""
        try:
            found = float(self._order.rank(tenant))
            if math.isfinite(found):
                return found
            raise ValueError(f"the rank of {tenant!r} is {found}")  # one way for both failures
        except Exception as error:  # noqa: BLE001  # logged in full; the device must not stand still
            self._note("rank", error)
            return 0.0

    def _call(self, method: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # as above
            self._note(method, error)

    def _note(self, method: str, error: Exception) -> None:
        if method not in self._failed:
            self._failed.add(method)
            _log.error("the admission policy failed in %s", method, exc_info=error)
