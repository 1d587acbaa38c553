"""Waits for a worker that is starting, and informs the client meanwhile."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from djinn_plugins.server.authentication import NoWorkerError
from djinn_plugins.server.supervisor import PATIENCE_S, Supervisor
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.worker_process import START_TIMEOUT_S, Worker

__all__ = ("await_worker",)

FIRST_S = 0.25
"""Delay before the client is first informed that its worker is starting."""
EVERY_S = 1.0
"""Interval of later notices; much shorter than any client's timeout for a silent server."""


async def await_worker(
    supervisor: Supervisor, tenant: Tenant, place: str, inform: Callable[[float], Awaitable[None]]
) -> Worker:
    """Return a worker of a tenant as soon as it serves.

    The wait is limited by the supervisor's start timeout if a process is starting, and by `PATIENCE_S` if none is
    because the previous ones died.

    Args:
        supervisor: Manages the workers.
        tenant: The tenant.
        place: Which of its sessions share the worker.
        inform: Informs the client how many seconds it has waited; raises if the client is gone.

    Raises:
        RefusedError: No worker serves in time.
        LimitError: As for `djinn_plugins.server.supervisor.Supervisor.worker_of`.
    """
    began, patience_s = time.monotonic(), FIRST_S
    while True:
        try:
            return await supervisor.worker_of(tenant, place, patience_s=patience_s)
        except NoWorkerError as error:
            waited_s = time.monotonic() - began
            if waited_s >= (START_TIMEOUT_S if error.is_starting else PATIENCE_S):
                raise
            await inform(waited_s)
            patience_s = EVERY_S
