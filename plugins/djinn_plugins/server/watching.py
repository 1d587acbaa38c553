"""Watches for tenants whose tokens have ended or whose limits have changed."""

from __future__ import annotations

import logging
import time

import anyio
import anyio.to_thread

from djinn.errors import TokenEndedError
from djinn_plugins.server.authentication import Authentication
from djinn_plugins.server.control import EndSessions
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.supervisor import Supervisor
from djinn_plugins.server.tenants import AuthenticatedClient, Tenant, token_ended

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
        tasks: Where sessions end.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, authentication: Authentication, supervisor: Supervisor, tasks: Tasks) -> None:
        self._authentication = authentication
        self._supervisor = supervisor
        self._tasks = tasks
        self._used: dict[tuple[str, str, bytes], float | None] = {}
        """When a token expires that has admitted sessions; by name and key of its tenant, and its identity."""
        self._ending: set[str] = set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await anyio.sleep(LOOK_S)
            await self.look()

    def let_in(self, client: AuthenticatedClient) -> None:
        """Record that a token has admitted a new or resumed session of a tenant."""
        self._used[client.tenant.name, client.tenant.key, client.token] = client.expires_s

    async def look(self) -> None:
        """End sessions and send limits where that is due."""
        # An authenticator may read files, or ask other services.
        current, ended = await anyio.to_thread.run_sync(
            self._ask, self._supervisor.tenants(), dict(self._used), abandon_on_cancel=True)
        for tenant, now, why in current:
            if now is not None:
                await self._supervisor.change(now)
            elif tenant.key not in self._ending:
                self._ending.add(tenant.key)
                _log.warning("%s: %s All sessions of this tenant end.", tenant.name, "" if why is None else why.summary)
                self._tasks.spawn(self._end, tenant, why)
        for (name, key, token), ending in ended.items():
            self._used.pop((name, key, token), None)
            message = EndSessions(token, ending.code, ending.summary, ending.hint)
            if await self._supervisor.tell(Tenant(name, key=key), message):
                _log.warning("%s: %s Sessions that were let in by it end.", name, ending.summary)

    def _ask(
        self, tenants: list[Tenant], used: dict[tuple[str, str, bytes], float | None]
    ) -> tuple[list[tuple[Tenant, Tenant | None, TokenEndedError | None]],
               dict[tuple[str, str, bytes], TokenEndedError]]:
        """Ask the authenticator for the tenants' current limits, and for the tokens that have ended."""
        ended: dict[tuple[str, str, bytes], TokenEndedError] = {}
        for (name, key, token), expires_s in used.items():
            why = (token_ended(expires_s) if expires_s is not None and expires_s <= time.time()
                   else self._authentication.why_ended(Tenant(name, key=key), token))
            if why is not None:
                ended[name, key, token] = why
        current: list[tuple[Tenant, Tenant | None, TokenEndedError | None]] = []
        for tenant in tenants:
            now = self._authentication.current(tenant)
            current.append((tenant, now, self._authentication.why_ended(tenant, b"") if now is None else None))
        return current, ended

    async def _end(self, tenant: Tenant, why: TokenEndedError | None) -> None:
        try:
            await self._supervisor.end(tenant, END_TIMEOUT_S, why)
        finally:
            self._ending.discard(tenant.key)
