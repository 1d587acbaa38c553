"""Waiting for a worker that is starting, and keeping the client informed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from djinn_server.supervisor import PATIENCE_S, Supervisor
from djinn_server.tenants import NoWorkerError, Tenant
from djinn_server.worker_process import START_TIMEOUT_S, Worker

__all__ = ("await_worker",)

FIRST_S = 0.25
"""After so much time the client hears for the first time that its worker is starting."""
EVERY_S = 1.0
"""How often it hears so; far less than any client waits without a word."""


def await_worker(supervisor: Supervisor, tenant: Tenant, inform: Callable[[float], None]) -> Worker:
    """Return a tenant's worker, once it serves.

    A process that is starting is waited for as long as the supervisor does; where none is, because the last ones died,
    only `PATIENCE_S`.

    Args:
        supervisor: Has the workers.
        tenant: The tenant.
        inform: Tells the client that it has waited so many seconds; raises if the client is gone.

    Raises:
        RefusedError: It does not serve.
    """
    began, patience_s = time.monotonic(), FIRST_S
    while True:
        try:
            return supervisor.worker_of(tenant, patience_s=patience_s)
        except NoWorkerError as error:
            waited_s = time.monotonic() - began
            if waited_s >= (START_TIMEOUT_S if error.is_starting else PATIENCE_S):
                raise
            inform(waited_s)
            patience_s = EVERY_S
