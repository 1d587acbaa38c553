"""Watches for tenants whose tokens have ended or whose limits have changed."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import anyio
import anyio.to_thread
from djinn_lib_server.tenants import AuthenticatedClient, Tenant, token_ended

from djinn.errors import TokenEndedError
from djinn_server.authentication import Authentication
from djinn_server.control import EndSessions
from djinn_server.event_loop import EventLoop
from djinn_server.supervisor import Supervisor

__all__ = ("TenantWatch",)

LOOK_S = 0.25
"""How often to check. With the authenticator ``tokens``, a check costs one system call."""
END_TIMEOUT_S = 1.0
"""How long programs of a removed tenant may continue. The worker is killed one second later. That leaves a margin
within the 5 s in which sessions must end, for machines whose processors are busy."""
_log = logging.getLogger("djinn.server")


class TenantWatch:
    """Ends sessions whose tokens have ended, and sends changed limits to workers.

    Args:
        authentication: Says whose token has ended.
        supervisor: Manages the workers.
        loop: Where tasks run.

    Concurrency:
        `run` is a task; `let_in` and `look` are called by any thread.
    """

    def __init__(self, authentication: Authentication, supervisor: Supervisor, loop: EventLoop) -> None:
        self._authentication = authentication
        self._supervisor = supervisor
        self._loop = loop
        self._lock = threading.Lock()
        self._used: dict[tuple[str, str, bytes], float | None] = {}
        """When a token expires that has admitted sessions; by name and key of its tenant, and its identity."""
        self._ending: set[str] = set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await anyio.sleep(LOOK_S)
            # An authenticator may read files, or ask other services.
            await anyio.to_thread.run_sync(self.look, abandon_on_cancel=True)

    def let_in(self, client: AuthenticatedClient) -> None:
        """Record that a token has admitted a new or resumed session of a tenant."""
        with self._lock:
            self._used[client.tenant.name, client.tenant.key, client.token] = client.expires_s

    def look(self) -> None:
        """End sessions and send limits where that is due."""
        for tenant in self._supervisor.tenants():
            now = self._authentication.current(tenant)
            if now is not None:
                self._supervisor.change(now)
            else:
                self._begin_end(tenant)
        with self._lock:
            used = list(self._used.items())
        for (name, key, token), expires_s in used:
            tenant = Tenant(name, key=key)
            why = (token_ended(expires_s) if expires_s is not None and expires_s <= time.time()
                   else self._authentication.why_ended(tenant, token))
            if why is not None:
                with self._lock:
                    self._used.pop((name, key, token), None)
                if self._supervisor.tell(tenant, EndSessions(token, why.code, why.summary, why.hint)):
                    _log.warning("%s: %s Sessions that were let in by it end.", name, why.summary)

    def _begin_end(self, tenant: Tenant) -> None:
        with self._lock:
            if tenant.key in self._ending:
                return
            self._ending.add(tenant.key)
        why = self._authentication.why_ended(tenant, b"")
        _log.warning("%s: %s All sessions of this tenant end.", tenant.name, "" if why is None else why.summary)
        self._loop.spawn(partial(anyio.to_thread.run_sync, abandon_on_cancel=True), partial(self._end, tenant, why))

    def _end(self, tenant: Tenant, why: TokenEndedError | None) -> None:
        try:
            self._supervisor.end(tenant, END_TIMEOUT_S, why)
        finally:
            with self._lock:
                self._ending.discard(tenant.key)
