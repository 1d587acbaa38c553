"""The admission policy ``fair``: tenants share a device in proportion to their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djinn.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from djinn_plugins.server.kinds.admission import AdmissionFactory

__all__ = ("djinn_register_admissions",)


@hookimpl
def djinn_register_admissions(register: Callable[[AdmissionFactory], None]) -> None:
    """Register the policy."""
    from djinn_plugins.server.fair_admission.fair_queue import FairAdmission

    register(FairAdmission())
