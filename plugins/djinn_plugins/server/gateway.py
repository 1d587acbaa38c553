"""The gateway: the process that clients connect to. It admits them, passes them to workers, and runs no operations."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from djinn.errors import ConfigurationError, DjinnError, LimitError, RefusedError
from djinn.wire.messages import Hello, PeerHello, Starting
from djinn_plugins.common.kinds.transport import Channel, Listener, SupportsAsyncAccept, SupportsHandover
from djinn_plugins.common.net.stranger_log import StrangerLog
from djinn_plugins.common.operators.stored_models import StoredModel
from djinn_plugins.executor.peer_exchange import check_versions
from djinn_plugins.server.abilities import supports
from djinn_plugins.server.authentication import Authentication
from djinn_plugins.server.changes import Changes
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.handshake import greeting_of, receive_from, refuse_async, send_to
from djinn_plugins.server.isolation import SPARE, described, place_of
from djinn_plugins.server.kinds.admission import AdmissionPolicy
from djinn_plugins.server.kinds.metrics import MetricsFactory, Reason
from djinn_plugins.server.operating import Operating
from djinn_plugins.server.operator_socket import OperatorSocket, ask
from djinn_plugins.server.options import ServeOptions
from djinn_plugins.server.outputs import Outputs, ServerMetrics
from djinn_plugins.server.oversight import RunWatch, Verdicts
from djinn_plugins.server.pending_handshakes import MAX_WAITING, PendingHandshakes
from djinn_plugins.server.starting import await_worker
from djinn_plugins.server.supervisor import Supervisor
from djinn_plugins.server.tenants import AuthenticatedClient
from djinn_plugins.server.watching import LOOK_S, TenantWatch
from djinn_plugins.server.worker_process import Connected, Worker

__all__ = ("Gateway",)

RETRY_S = 0.01
"""How long to wait before a client is passed to a worker again, after one that has died."""
MAX_CHECKS = 16
"""How many clients' tokens are checked at a time."""
_log = logging.getLogger("djinn.server")
_strangers = StrangerLog(_log)


class _Handshake:
    """A connection whose client has not identified itself; its task ends with `close`."""

    def __init__(self, peer: str, scope: anyio.CancelScope) -> None:
        self.peer = peer
        self._scope = scope

    def close(self) -> None:
        self._scope.cancel()


class Gateway:
    """Admits clients and passes them to workers, in one event loop.

    Args:
        listener: Where clients connect; closed at the end.
        authentication: Says who a client is.
        admission: Says who may start a session.
        supervisor: Manages the workers; stopped at the end.
        options: The server's options.
        tasks: What runs in the event loop.
        control: Path of the operator's socket; ``None`` for no socket.

    Raises:
        ConfigurationError: The operator's socket cannot be bound to that path.

    Attributes:
        watch: Watches the tenants' tokens.
        is_accepting: Whether new connections are accepted; ``False`` once the listener has failed, too.

    Concurrency:
        Tasks of one event loop; any thread calls `why_not_ready`. The calls of the authenticator and of the admission
        policy, if one of them is not quick, and waits of transports that cannot be awaited, use threads.
    """

    def __init__(
        self, listener: Listener, authentication: Authentication, admission: AdmissionPolicy, supervisor: Supervisor,
        options: ServeOptions, tasks: Tasks, *, control: Path | None = None,
    ) -> None:
        self._listener = listener
        self._authentication = authentication
        self._admission = admission
        self._options = options
        self._is_quick = authentication.is_quick and admission.is_quick
        self._supervisor = supervisor
        self._counts = supervisor.ledger.gateway
        self._room = PendingHandshakes(reject=lambda: self._counts.reject("waiting_room"))
        self._outputs: Outputs | None = None
        self._verdicts = Verdicts()
        self._tasks = tasks
        self._waits = anyio.CapacityLimiter(MAX_WAITING)
        self._checks = anyio.CapacityLimiter(MAX_CHECKS)
        self._runs = RunWatch(supervisor.workers, self._verdicts, options.sessions.max_run_s, self._counts)
        self._operator = None if control is None else OperatorSocket(
            control, Operating(supervisor, self._verdicts).handlers())
        self.watch = TenantWatch(authentication, supervisor, tasks)
        self.is_accepting = False
        self._acceptor: anyio.CancelScope | None = None
        self._changes = Changes()

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return self._listener.address

    def why_not_ready(self) -> str:
        """Say why sessions cannot begin at the moment; empty if they can."""
        if not self.is_accepting:
            return "The server accepts no connections."
        return self._supervisor.why_not_ready()

    def show_metrics(self, factories: Sequence[MetricsFactory], options: ServeOptions, version: str,
                     models: Callable[[], Sequence[StoredModel]] = tuple) -> list[str]:
        """Show or write metrics until the end, and return the addresses where they can be read.

        Args:
            factories: Open the outputs.
            options: The server's options.
            version: Of this distribution.
            models: Lists the models of the store.

        Raises:
            DjinnError: An output cannot be opened.
        """
        self._outputs = Outputs(factories, options,
                                ServerMetrics(version, self._supervisor.ledger, self.why_not_ready, self.address,
                                              models, self._tenant_of, self._operate, self._pages))
        return self._outputs.addresses

    def _pages(self) -> Sequence[str]:
        return () if self._outputs is None else self._outputs.addresses

    def _tenant_of(self, token: str) -> str:
        return self._authentication.authenticate(token).tenant.name

    def _operate(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Ask this server as its operator does, so that the event loop executes it."""
        if self._operator is None:
            raise ConfigurationError("The server has no operator's socket.", hint="Give it one with --control.")
        return ask(self._operator.path, command, **arguments)

    async def run(self, operate: Callable[[], Awaitable[int]]) -> int:
        """Accept connections until something else ends, then end all workers.

        Args:
            operate: Runs meanwhile; its result is returned.
        """
        async with anyio.create_task_group() as group:
            self._tasks.enter(group)
            self.is_accepting = True
            self._supervisor.begin()
            group.start_soon(self._accept)
            try:
                status = await operate()
            finally:
                with anyio.CancelScope(shield=True):
                    await self.stop()
                group.cancel_scope.cancel()
        return status

    async def wait_ready(self) -> None:
        """Wait for the first worker. Clients that connect meanwhile wait for it, too.

        Raises:
            DjinnError: It cannot start.
        """
        boundary, first = self._supervisor.boundary, self._authentication.tenant
        _log.info("%s", described(boundary, self._options, has_tenants=first is None))
        if first is not None:
            await self._supervisor.worker_of(first, "" if boundary == "tenant" else SPARE, patience_s=None,
                                             is_first=True)
        self._tasks.spawn(self.watch.run)
        self._tasks.spawn(self._runs.run)
        if self._operator is not None:
            self._tasks.spawn(self._operator.run)
        _log.info("accepting on %s", self.address)

    async def wait_failed(self) -> None:
        """Wait until no connections are accepted any more."""
        await self._changes.wait_for(lambda: not self.is_accepting)

    async def renew(self, options: ServeOptions) -> None:
        """Use other options, as far as they can change while the server runs."""
        self._runs.limit_s = options.sessions.max_run_s
        await self.watch.look()

    async def drain(self) -> None:
        """Refuse new sessions, and wait until the last one has ended. Existing ones continue over new connections."""
        await self._supervisor.drain()
        await self._supervisor.wait_drained()

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop accepting and end all workers.

        Args:
            timeout_s: How long to wait for running programs, which cannot be interrupted.

        Returns:
            Whether all workers exited in time.
        """
        self.is_accepting = False
        if self._acceptor is not None:
            self._acceptor.cancel()
        self._room.close()
        ended = await self._supervisor.stop(timeout_s)
        await anyio.to_thread.run_sync(self.close)
        _log.info("stopped")
        return ended

    def close(self) -> None:
        """Close what the gateway has opened. May be called twice, and without `run`."""
        self._listener.close()
        if self._operator is not None:
            self._operator.close()
        if self._outputs is not None:
            self._outputs.stop()

    async def _accept(self) -> None:
        with anyio.CancelScope() as self._acceptor:
            try:
                while (channel := await self._next()) is not None:
                    self._tasks.spawn(self._greet, channel)
            finally:
                self._listener.close()
                self.is_accepting = False
                self._changes.notify()

    async def _next(self) -> Channel | None:
        if supports(self._listener, SupportsAsyncAccept):
            return await self._listener.accept_async()
        return await anyio.to_thread.run_sync(self._listener.accept, limiter=self._waits, abandon_on_cancel=True)

    async def _greet(self, channel: Channel) -> None:
        meter = self._counts.open(channel)
        try:
            with anyio.CancelScope() as scope:
                waiting = _Handshake(channel.peer, scope)
                self._room.enter(waiting)
                await self._try_to_let_in(channel, waiting)
        finally:
            channel.close()
            self._counts.close(meter)

    async def _try_to_let_in(self, channel: Channel, waiting: _Handshake) -> None:
        try:
            await self._let_in(channel, waiting)
        except DjinnError as error:
            self._counts.ended(error)
            await refuse_async(channel, error)
        except Exception as error:  # noqa: BLE001  # logged in full; it must not end the gateway
            _log.exception("%s: the greeting failed", channel.peer)
            await refuse_async(channel, error)

    async def _let_in(self, channel: Channel, waiting: _Handshake) -> None:
        greeted = greeting_of(await receive_from(channel, self._waits))
        if greeted is None:
            return
        sequence, greeting = greeted
        check_versions(greeting)
        if isinstance(greeting, PeerHello):
            worker = self._supervisor.worker_with(greeting.mailbox)
            await self._pass_on(channel, sequence, greeting, worker, None, "")
            return
        client = self._admit(greeting, waiting) if self._is_quick else await anyio.to_thread.run_sync(
            self._admit, greeting, waiting, limiter=self._checks, abandon_on_cancel=True)
        admitted_s = time.monotonic()
        channel.greeted()
        place = place_of(self._supervisor.boundary, greeting)
        with self._rejecting("worker"):
            # The values of a dead worker are lost, so a client that wants to resume need not wait for the next worker.
            worker = (self._supervisor.present_worker(client.tenant, greeting.resume) if greeting.resume
                      else await await_worker(self._supervisor, client.tenant, place,
                                              lambda waited_s: send_to(channel, sequence, Starting(waited_s))))
        if time.monotonic() - admitted_s > LOOK_S:
            # The token was valid when the client connected, and may have ended while the worker was starting.
            await anyio.to_thread.run_sync(self._authentication.check_current, client, limiter=self._checks)
        await self._pass_on(channel, sequence, greeting, worker, client, place)
        # The watch sees from now on when the token ends. Earlier, it could end a session that has not begun.
        self.watch.let_in(client)

    async def _pass_on(self, channel: Channel, sequence: int, greeting: Hello | PeerHello, worker: Worker,
                       client: AuthenticatedClient | None, place: str) -> None:
        """Pass a client or a peer to a worker; a new session, to the next one if that dies before it has taken it."""
        token = b"" if client is None else client.token
        if not worker.takes_over(channel) or not supports(channel, SupportsHandover):
            await worker.redirect(channel, sequence, token)
            return
        is_resumed = isinstance(greeting, Hello) and bool(greeting.resume)
        connection = Connected.of(channel, sequence, greeting, token)
        try:
            # What resumes a session, and what a peer brings, is of no use to another worker.
            while not await worker.take(connection) and client is not None and not is_resumed:
                _strangers.write(logging.INFO, "clients whose worker has died", "%s: its worker has died, it waits for "
                                 "the next one", channel.peer)
                await anyio.sleep(RETRY_S)
                worker = await self._supervisor.worker_of(client.tenant, place)
        finally:
            os.close(connection.descriptor)

    def _admit(self, greeting: Hello, waiting: _Handshake) -> AuthenticatedClient:
        """Check who a client is, and whether its session may begin."""
        with self._rejecting("token"):
            client = self._authentication.authenticate(greeting.token, resumes=bool(greeting.resume))
        self._room.leave(waiting)
        if greeting.resume:
            self._verdicts.check(greeting.resume)
            return client
        with self._rejecting("offender"):
            self._supervisor.offenders.check(greeting.owner)
        with self._rejecting("admission"):
            self._admission.admit(client.tenant, self._supervisor.load(client.tenant))
        return client

    @contextlib.contextmanager
    def _rejecting(self, reason: Reason) -> Iterator[None]:
        """Count refused clients."""
        try:
            yield
        except (LimitError, RefusedError):
            self._counts.reject(reason)
            raise
