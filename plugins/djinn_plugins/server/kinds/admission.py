"""Admission policies: who may start a session, and which tenant uses a device next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenants import Tenant

__all__ = ("AdmissionFactory", "AdmissionPolicy", "ServerLoad", "TurnOrder")


class TurnOrder:
    """Orders the tenants that wait for a turn on one device. This base class is first come, first served.

    `djinn_plugins.server.turn_queue.TurnQueue` calls it once per turn, not per operation. The queue keeps the device
    busy: it grants free slots at once, and recalls turns that others wait for. The order only decides who is next. If a
    method raises, the server logs it and continues without that call; a rank that is no finite number counts as 0.

    Concurrency:
        One thread at a time.

    Laws:
        admission.ranks_are_numbers, admission.rank_changes_nothing, admission.same_history_same_order,
        admission.devices_are_independent
    """

    def join(self, tenant: str, weight: float) -> None:
        """Add a tenant, or one that has left before.

        Args:
            tenant: Its name.
            weight: Its weight, above 0.
        """

    def reweigh(self, tenant: str, weight: float) -> None:
        """Change a tenant's weight."""

    def leave(self, tenant: str) -> None:
        """Remove a tenant, which has no turn any more."""

    def request(self, tenant: str) -> None:
        """Note that a tenant begins to wait for a turn."""

    def grant(self, tenant: str) -> None:
        """Note that a waiting tenant gets a turn."""

    def charge(self, tenants: Sequence[str], passed_s: float, *, contended: bool) -> None:
        """Charge the time that passed to the tenants that have turns.

        Args:
            tenants: The tenants.
            passed_s: The time, since the last call.
            contended: Whether others were waiting meanwhile.
        """

    def finish(self, tenant: str) -> None:
        """Note that a tenant's turn has ended."""

    def idle(self) -> None:
        """Note that no tenant has a turn or waits for one."""

    def rank(self, tenant: str) -> float:
        """Return a tenant's rank, a finite number. It must not change anything.

        Of the waiting tenants, the one with the lowest rank is next; of equal ones, the one that has waited longest. Of
        the tenants that have turns, the one with the highest rank gives its turn back first: at once if one that ranks
        lower has just begun to wait, and otherwise after the shortest length of a turn.
        """
        return 0.0


@attrs.frozen
class ServerLoad:
    """The load of a server when a session is about to begin.

    Attributes:
        tenant_sessions: Sessions of the same tenant, as of its workers' last reports.
        sessions: Sessions of all tenants.
        workers: Workers that serve, at least one for each tenant that has connected.
        waiting: Tenants that wait for a turn on a device.
    """

    tenant_sessions: int = 0
    sessions: int = 0
    workers: int = 0
    waiting: int = 0


class AdmissionPolicy:
    """Decides who may start, and gives each device an order of turns. This base class admits every session.

    It runs in the gateway. Limits of a tenant apply in addition, in its worker.

    Attributes:
        is_quick: Whether `admit` never waits, so that the gateway calls it in its event loop rather than in a thread.

    Concurrency:
        Any thread.

    Laws:
        admission.answers_or_refuses
    """

    is_quick: bool = False

    def admit(self, tenant: Tenant, load: ServerLoad) -> None:
        """Admit a new session. Sessions that are resumed need no admission.

        Raises:
            LimitError: The session may not begin now; ``retry_after_s`` says when to try again.
        """

    def order_of(self, device: str) -> TurnOrder:
        """Return a new order of turns for a device."""
        return TurnOrder()


class AdmissionFactory(Protocol):
    """Opens an admission policy; what plugins register."""

    name: str
    """Name in the configuration."""

    def open(self, options: ServeOptions) -> AdmissionPolicy:
        """Open the policy, in the gateway.

        Raises:
            ConfigurationError: The options cannot be used.
        """
