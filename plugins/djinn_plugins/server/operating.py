"""Executes the operator's commands on a running server: listing sessions and ending them."""

from __future__ import annotations

import signal
import time
from typing import Any

import anyio
import msgspec

from djinn.errors import ConfigurationError, SessionTerminatedError
from djinn_plugins.server.control import EndSession, RenameSession, SessionState
from djinn_plugins.server.operator_socket import Handler
from djinn_plugins.server.oversight import Verdicts
from djinn_plugins.server.session_rows import EVERYBODY, SessionRow
from djinn_plugins.server.supervisor import Supervisor
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.worker_process import Worker

__all__ = ("Operating",)

LOOK_TIMEOUT_S = 2.0
"""How long a worker may take to report its sessions."""
TICK_S = 0.05
MIN_PREFIX = 4
_HINT = "Ask the server's operator why. djinn.init() starts a new session."


class _Kick(msgspec.Struct, forbid_unknown_fields=True):
    target: str
    wait_s: float = 5.0
    keeps_worker: bool = False


class _Rename(msgspec.Struct, forbid_unknown_fields=True):
    named: str
    holder: str


class Operating:
    """Handles the operator's commands.

    Args:
        supervisor: Manages the workers.
        verdicts: Records which sessions were ended.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, supervisor: Supervisor, verdicts: Verdicts) -> None:
        self._supervisor = supervisor
        self._verdicts = verdicts

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by command."""
        return {"sessions": lambda _: self.sessions(),
                "drain": lambda _: self.drain(),
                "rename": lambda arguments: self.rename(msgspec.convert(arguments, _Rename)),
                "kick": lambda arguments: self.kick(msgspec.convert(arguments, _Kick))}

    async def sessions(self) -> list[SessionRow]:
        """List all sessions, and the workers that do not answer."""
        return [row for row, _ in await self._rows()]

    async def drain(self) -> dict[str, Any]:
        """Drain the server, as on SIGTERM: sessions may continue for ``--drain-s``, and then it ends."""
        signal.raise_signal(signal.SIGTERM)
        return {}

    async def rename(self, wanted: _Rename) -> dict[str, Any]:
        """Rename a named session, because another server of the cluster has a later one."""
        for tenant, worker in self._supervisor.workers():
            if name := self._supervisor.ledger.session_named(tenant.name, wanted.named):
                await worker.tell(RenameSession(name, wanted.holder))
        return {}

    async def _rows(self) -> list[tuple[SessionRow, Worker]]:
        found: dict[Worker, list[SessionRow]] = {}

        async def ask(tenant: Tenant, worker: Worker) -> None:
            found[worker] = await _rows(tenant, worker)

        workers = self._supervisor.workers()
        async with anyio.create_task_group() as asking:
            for tenant, worker in workers:
                asking.start_soon(ask, tenant, worker)
        return [(row, worker) for _, worker in workers for row in found[worker]]

    async def kick(self, wanted: _Kick) -> dict[str, Any]:
        """End a tenant's sessions, or one session.

        Returns:
            How many ``sessions`` were asked to end, the ``worker`` that had to be killed for it (0: none), and the
            session that ``remains`` because its program is still running.

        Raises:
            ConfigurationError: There is no such tenant and no such session, or more than one.
        """
        own = [(tenant, worker) for tenant, worker in self._supervisor.workers()
               if wanted.target == (tenant.name or EVERYBODY)]
        if own:
            return await self._kick_tenant(own, wanted)
        found = [(row, worker) for row, worker in await self._rows()
                 if len(wanted.target) >= MIN_PREFIX and row.session.startswith(wanted.target)]
        if len(found) != 1:
            raise ConfigurationError(
                f"There are {len(found)} sessions that begin with {wanted.target!r}." if found
                else f"There is neither a tenant nor a session {wanted.target!r}.",
                hint=f"`djinn sessions` lists them; {MIN_PREFIX} characters of a session's name are needed at least.")
        return await self._kick_session(*found[0], wanted)

    async def _kick_tenant(self, own: list[tuple[Tenant, Worker]], wanted: _Kick) -> dict[str, Any]:
        error = SessionTerminatedError("The server's operator has ended this tenant's sessions.", hint=_HINT)
        count = 0

        async def end(worker: Worker) -> None:
            nonlocal count
            states = await worker.look(LOOK_TIMEOUT_S) or ()
            for state in states:
                self._verdicts.add(state.key_digest, error)
            count += len(states)
            await worker.tell(EndSession("", error.code, error.summary, error.hint))

        async with anyio.create_task_group() as ending:
            for _, worker in own:
                ending.start_soon(end, worker)
        self._supervisor.ledger.gateway.end("kicked", max(1, count))
        has_ended = await self._supervisor.end(own[0][0], wanted.wait_s)
        return {"sessions": count, "worker": 0 if has_ended else own[0][1].pid, "remains": ""}

    async def _kick_session(self, row: SessionRow, worker: Worker, wanted: _Kick) -> dict[str, Any]:
        error = SessionTerminatedError("The server's operator has ended this session.", hint=_HINT)
        running = worker.board.read()
        for state in await worker.look(LOOK_TIMEOUT_S) or ():
            if state.session == row.session:
                self._verdicts.add(state.key_digest, error)
        if running is not None and running.session == row.session:
            self._verdicts.add(running.key_digest, error)
        await worker.tell(EndSession(row.session, error.code, error.summary, error.hint))
        self._supervisor.ledger.gateway.end("kicked", 1)
        deadline = time.monotonic() + wanted.wait_s
        while _has(await worker.look(LOOK_TIMEOUT_S), row.session):
            if time.monotonic() >= deadline:
                if wanted.keeps_worker:
                    return {"sessions": 1, "worker": 0, "remains": row.session}
                worker.end("kicked")
                return {"sessions": 1, "worker": worker.pid, "remains": ""}
            await anyio.sleep(TICK_S)
        return {"sessions": 1, "worker": 0, "remains": ""}


def _has(states: tuple[SessionState, ...] | None, session: str) -> bool:
    """Whether a session still exists; assumed if its worker does not answer."""
    return states is None or any(state.session == session for state in states)


async def _rows(tenant: Tenant, worker: Worker) -> list[SessionRow]:
    states = await worker.look(LOOK_TIMEOUT_S)
    if states is None:
        running = worker.board.read()
        return [SessionRow(tenant.name, "" if running is None else running.session, worker.pid,
                           running_s=0.0 if running is None else running.age_s, answers=False)]
    return [SessionRow(tenant.name, state.session, worker.pid, state.peer, state.age_s, state.idle_s, state.queued,
                       state.running_s, state.held_bytes, state.handles, name=state.name, left_s=state.left_s,
                       program=state.program)
            for state in states]
