"""The admission policy ``fair``: tenants share a device in proportion to their weights.

A tenant's *tag* is the device time of its turns, divided by its weight. The waiting tenant with the lowest tag is next.
So over any period in which two tenants both want the device, they share it in proportion to their weights,
independently of their request patterns: with turns of at most L seconds, ``|W1 / w1 - W2 / w2| <= L / w1 + L / w2`` on
a device that one tenant may use at a time. A tenant that arrives later starts with the *virtual time*, which is the tag
that the others have reached: idle time earns no credit.

Source:
    Goyal, Vin and Cheng, "Start-time Fair Queueing: A Scheduling Algorithm for Integrated Services Packet Switching
    Networks", SIGCOMM 1996: a turn's start tag is ``max(v, F)``, where ``v`` is the virtual time and ``F`` the finish
    tag of the tenant's last turn; its finish tag is ``start + length / weight``. Only start tags decide, so the length
    of a turn need not be known in advance. With several slots: Jin, Chase and Kaur, "Interposed Proportional Sharing
    for a Storage Service Utility", SIGMETRICS 2004, where ``v`` is the start tag that was granted last.

Difference from these papers: while no other tenant waits, a turn continues, and the virtual time advances with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from djinn_plugins.server.kinds.admission import AdmissionPolicy, TurnOrder
from djinn_plugins.server.options import ServeOptions

__all__ = ("FairAdmission", "FairPolicy", "StartTimeFairOrder")


@attrs.define(eq=False)
class _Account:
    """The tags of one tenant."""

    weight: float
    start: float = 0.0
    """Tag of its current turn up to now, or of the turn that it waits for."""
    finish: float = 0.0


class StartTimeFairOrder(TurnOrder):
    """Start-time fair queueing on one device."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._virtual = 0.0

    def join(self, tenant: str, weight: float) -> None:
        """Add a tenant. One that returns keeps its old tag."""
        self._accounts.setdefault(tenant, _Account(weight)).weight = weight

    def reweigh(self, tenant: str, weight: float) -> None:
        """Change a tenant's weight."""
        self._accounts[tenant].weight = weight

    def request(self, tenant: str) -> None:
        """Set the start tag of a tenant that begins to wait."""
        account = self._accounts[tenant]
        account.start = max(self._virtual, account.finish)

    def grant(self, tenant: str) -> None:
        """Advance the virtual time to the start tag of the tenant."""
        self._virtual = max(self._virtual, self._accounts[tenant].start)

    def charge(self, tenants: Sequence[str], passed_s: float, *, contended: bool) -> None:
        """Advance the tags: of the tenants if others are waiting, otherwise all tags equally."""
        active = [self._accounts[tenant] for tenant in tenants]
        if contended:
            for account in active:
                account.start += passed_s / account.weight
            return
        passed = len(active) * passed_s / sum(account.weight for account in active)
        self._virtual += passed
        for account in active:
            account.start += passed

    def finish(self, tenant: str) -> None:
        """Set the finish tag of a tenant."""
        account = self._accounts[tenant]
        account.finish = account.start

    def idle(self) -> None:
        """Advance the virtual time to the last finish tag, since all tenants are idle."""
        self._virtual = max((self._virtual, *(account.finish for account in self._accounts.values())))

    def rank(self, tenant: str) -> float:
        """Return the start tag."""
        return self._accounts[tenant].start


class FairPolicy(AdmissionPolicy):
    """Admits all sessions within the tenants' limits, and shares each device fairly."""

    is_quick = True

    def order_of(self, device: str) -> TurnOrder:
        """Return a new fair order."""
        return StartTimeFairOrder()


class FairAdmission:
    """The admission policy ``fair``; see `djinn_plugins.server.kinds.admission.AdmissionFactory`."""

    name = "fair"

    def open(self, options: ServeOptions) -> AdmissionPolicy:
        """Open the policy."""
        return FairPolicy()
