"""The gateway: the process that clients connect to. It admits them, passes them to workers, and runs no operations."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from djinn_lib_server.options import MetricsOptions, ServeOptions
from djinn_lib_service.peer_exchange import check_courier

from djinn.errors import DjinnError, RefusedError
from djinn.kinds.transport import Channel, Listener
from djinn.wire.messages import PeerHello, Starting
from djinn_server.counters import Reason
from djinn_server.exposition import MetricsPage
from djinn_server.handshake import check_versions, receive_greeting
from djinn_server.operating import Operating
from djinn_server.operator_socket import OperatorSocket
from djinn_server.oversight import RunWatch, Verdicts
from djinn_server.pending_handshakes import PendingHandshakes
from djinn_server.server import refuse
from djinn_server.starting import await_worker
from djinn_server.supervisor import Supervisor
from djinn_server.tenants import OneTenant, Tenants
from djinn_server.watching import TenantWatch

__all__ = ("Gateway",)

_log = logging.getLogger("djinn.server")


class Gateway:
    """Admits clients and passes them to workers.

    Args:
        listener: Where clients connect; closed by `stop`.
        tenants: The tenants that are admitted.
        supervisor: Manages the workers; stopped by `stop`.
        options: The server's options.
        room: Holds connections that have not identified themselves.
        control: Path of the operator's socket; ``None`` for no socket.

    Raises:
        ConfigurationError: The operator's socket cannot be bound to that path.

    Attributes:
        watch: Watches the tenants' tokens.

    Concurrency:
        `start` and `stop` are called by one thread. Each connection is greeted in its own thread.
    """

    def __init__(
        self, listener: Listener, tenants: Tenants, supervisor: Supervisor, options: ServeOptions, *,
        room: PendingHandshakes | None = None, control: Path | None = None,
    ) -> None:
        self._listener = listener
        self._tenants = tenants
        self._supervisor = supervisor
        self._first = tenants.tenant if isinstance(tenants, OneTenant) else None
        self._counts = supervisor.ledger.gateway
        self._room = room or PendingHandshakes(reject=lambda: self._counts.reject("waiting_room"))
        self._page: MetricsPage | None = None
        self._verdicts = Verdicts()
        self._runs = RunWatch(supervisor.workers, self._verdicts, options.sessions.max_run_s, self._counts)
        self._operator = None if control is None else OperatorSocket(
            control, Operating(supervisor, self._verdicts).handlers())
        self.watch = TenantWatch(tenants, supervisor)
        self._acceptor = threading.Thread(target=self._accept, name="djinn-accept", daemon=True)

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return self._listener.address

    @property
    def is_accepting(self) -> bool:
        """Whether new connections are accepted; ``False`` before `start`, after `stop`, and if the listener failed."""
        return self._acceptor.is_alive()

    def why_not_ready(self) -> str:
        """Say why sessions cannot begin at the moment; empty if they can."""
        if not self.is_accepting:
            return "The server accepts no connections."
        return self._supervisor.why_not_ready()

    def show_metrics(self, options: MetricsOptions, version: str) -> str:
        """Serve metrics and probes until `stop`, and return their address.

        Args:
            options: Where to listen.
            version: Of this distribution.

        Raises:
            ConfigurationError, TransportError: See `djinn_server.exposition.MetricsPage`.
        """
        try:
            self._page = MetricsPage(options, self._supervisor.ledger, version, self.why_not_ready)
        except DjinnError:
            self.stop()
            raise
        self._page.start()
        return self._page.address

    def start(self) -> None:
        """Start accepting connections, and wait for the first worker. Clients that connect meanwhile wait for it, too.

        Raises:
            DjinnError: The first worker cannot start.
        """
        self._acceptor.start()
        if self._first is not None:
            try:
                self._supervisor.worker_of(self._first, patience_s=None, is_first=True)
            except BaseException:
                self.stop()
                raise
        self.watch.start()
        self._runs.start()
        if self._operator is not None:
            self._operator.start()
        _log.info("accepting on %s", self.address)

    def renew(self, options: ServeOptions) -> None:
        """Use other options, as far as they can change while the server runs."""
        self._runs.limit_s = options.sessions.max_run_s
        self.watch.look()

    def drain(self) -> None:
        """Refuse new sessions. Existing ones continue, also over new connections."""
        self._supervisor.drain()

    @property
    def is_drained(self) -> bool:
        """Whether the last session has ended since `drain`."""
        return self._supervisor.is_drained

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop accepting and end all workers.

        Args:
            timeout_s: How long to wait for running programs, which cannot be interrupted.

        Returns:
            Whether all workers exited in time.
        """
        self.watch.stop()
        if self._operator is not None:
            self._operator.stop()
        self._runs.stop()
        self._listener.close()
        self._room.close()
        ended = self._supervisor.stop(timeout_s)
        if self._page is not None:
            self._page.stop()
        _log.info("stopped")
        return ended

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.stop()

    def _accept(self) -> None:
        while (channel := self._listener.accept()) is not None:
            self._room.enter(channel)
            try:
                threading.Thread(target=self._greet, args=(channel,), name="djinn-greeting", daemon=True).start()
            except RuntimeError as error:
                _log.error("%s: no thread could be started: %s", channel.peer, error)  # no bug
                channel.close()

    def _greet(self, channel: Channel) -> None:
        meter = self._counts.open(channel)
        try:
            self._let_in(channel)
        except DjinnError as error:
            self._counts.ended(error)
            refuse(channel, error)
        except Exception as error:  # noqa: BLE001  # logged in full; it must not end the gateway
            _log.exception("%s: the greeting failed", channel.peer)
            refuse(channel, error)
        finally:
            channel.close()
            self._counts.close(meter)

    def _let_in(self, channel: Channel) -> None:
        received = receive_greeting(channel)
        if received is None:
            return
        sequence, greeting = received
        if isinstance(greeting, PeerHello):
            check_courier(greeting)
            self._supervisor.worker_with(greeting.mailbox).take(channel, sequence, greeting)
            return
        check_versions(greeting)
        with self._rejecting("token"):
            admitted = self._tenants.admit(greeting.token, resumes=bool(greeting.resume))
        tenant = admitted.tenant
        self._room.leave(channel)
        channel.greeted()
        if greeting.resume:
            self._verdicts.check(greeting.resume)
        else:
            with self._rejecting("offender"):
                self._supervisor.offenders.check(greeting.owner)
        with self._rejecting("worker"):
            # The values of a dead worker are lost, so a client that wants to resume need not wait for the next worker.
            worker = (self._supervisor.present_worker(tenant) if greeting.resume
                      else await_worker(self._supervisor, tenant,
                                        lambda waited_s: channel.send(sequence, Starting(waited_s))))
        if (why := self._tenants.why_ended(tenant, admitted.token)) is not None:
            # The token was valid when the client connected, and has ended while the worker was starting.
            raise why
        worker.take(channel, sequence, greeting, admitted.token)
        self.watch.let_in(tenant, admitted.token)

    @contextlib.contextmanager
    def _rejecting(self, reason: Reason) -> Iterator[None]:
        """Count refused clients."""
        try:
            yield
        except RefusedError:
            self._counts.reject(reason)
            raise
