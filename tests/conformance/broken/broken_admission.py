"""An admission policy that keeps every law, and others that do not."""

from __future__ import annotations

import itertools
from typing import Any

from djinn.errors import LimitError
from djinn.hookspecs import hookimpl
from djinn_plugins.server.kinds.admission import AdmissionPolicy, ServerLoad, TurnOrder
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.tenants import Tenant

BROKEN: dict[str, tuple[str, set[str]]] = {
    "forgets-who-left": ("admission.ranks_are_numbers", {
        "admission.rank_changes_nothing", "admission.same_history_same_order", "admission.devices_are_independent"}),
    "counts-questions": ("admission.rank_changes_nothing", set()),
    "changes-its-mind": ("admission.same_history_same_order", {
        "admission.rank_changes_nothing", "admission.devices_are_independent"}),
    "one-order-for-all": ("admission.devices_are_independent", set()),
    "knows-no-errors": ("admission.answers_or_refuses", set()),
}
"""Name of each broken policy, the law that it breaks, and others that it may break as a consequence."""
MADE = itertools.count()


class _Order(TurnOrder):
    def __init__(self, flaw: str) -> None:
        self._flaw = flaw
        self._weights: dict[str, float] = {}
        self._asked: dict[str, int] = {}
        self._sign = -1 if flaw == "changes-its-mind" and next(MADE) % 2 else 1

    def join(self, tenant: str, weight: float) -> None:
        self._weights[tenant] = weight

    def reweigh(self, tenant: str, weight: float) -> None:
        self._weights[tenant] = weight

    def leave(self, tenant: str) -> None:
        if self._flaw == "forgets-who-left":
            del self._weights[tenant]

    def rank(self, tenant: str) -> float:
        asked = 0
        if self._flaw == "counts-questions":
            asked = self._asked[tenant] = self._asked.get(tenant, 0) + 1
        return self._sign * -self._weights[tenant] + asked


class _Policy(AdmissionPolicy):
    def __init__(self, flaw: str) -> None:
        self._flaw = flaw
        self._shared = _Order(flaw) if flaw == "one-order-for-all" else None

    def admit(self, tenant: Tenant, load: ServerLoad) -> None:
        if load.sessions > 100:
            if self._flaw == "knows-no-errors":
                raise OSError("too many")
            raise LimitError("There are too many sessions.", retry_after_s=1.0)

    def order_of(self, device: str) -> TurnOrder:
        return self._shared or _Order(self._flaw)


class _Factory:
    def __init__(self, flaw: str) -> None:
        self.name = self._flaw = flaw

    def open(self, options: ServeOptions) -> AdmissionPolicy:
        return _Policy(self._flaw)


@hookimpl
def djinn_register_admissions(register: Any) -> None:
    for name in ("healthy", *BROKEN):
        register(_Factory(name))
