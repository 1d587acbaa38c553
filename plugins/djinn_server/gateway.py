"""The gateway: the process that clients connect to. It admits them, passes them to workers, and runs no operations."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from djinn_lib_server.kinds.admission import AdmissionPolicy
from djinn_lib_server.kinds.metrics import MetricsFactory, Reason
from djinn_lib_server.options import ServeOptions
from djinn_lib_service.kinds.transport import Channel, Listener
from djinn_lib_service.peer_exchange import check_versions

from djinn.errors import DjinnError, LimitError, RefusedError
from djinn.wire.messages import PeerHello, Starting
from djinn_server.authentication import Authentication
from djinn_server.event_loop import EventLoop
from djinn_server.handshake import receive_greeting
from djinn_server.operating import Operating
from djinn_server.operator_socket import OperatorSocket
from djinn_server.outputs import Outputs, ServerMetrics
from djinn_server.oversight import RunWatch, Verdicts
from djinn_server.pending_handshakes import PendingHandshakes
from djinn_server.server import refuse
from djinn_server.starting import await_worker
from djinn_server.supervisor import Supervisor
from djinn_server.watching import TenantWatch

__all__ = ("Gateway",)

_log = logging.getLogger("djinn.server")


class Gateway:
    """Admits clients and passes them to workers.

    Args:
        listener: Where clients connect; closed by `stop`.
        authentication: Says who a client is.
        admission: Says who may start a session.
        supervisor: Manages the workers; stopped by `stop`.
        options: The server's options.
        loop: Runs what waits; from `start` to `stop`.
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
        self, listener: Listener, authentication: Authentication, admission: AdmissionPolicy, supervisor: Supervisor,
        options: ServeOptions, loop: EventLoop, *,
        room: PendingHandshakes | None = None, control: Path | None = None,
    ) -> None:
        self._listener = listener
        self._authentication = authentication
        self._admission = admission
        self._supervisor = supervisor
        self._counts = supervisor.ledger.gateway
        self._room = room or PendingHandshakes(reject=lambda: self._counts.reject("waiting_room"))
        self._outputs: Outputs | None = None
        self._verdicts = Verdicts()
        self._loop = loop
        self._runs = RunWatch(supervisor.workers, self._verdicts, options.sessions.max_run_s, self._counts)
        self._operator = None if control is None else OperatorSocket(
            control, Operating(supervisor, self._verdicts).handlers())
        self.watch = TenantWatch(authentication, supervisor, self._loop)
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

    def show_metrics(self, factories: Sequence[MetricsFactory], options: ServeOptions, version: str) -> list[str]:
        """Show or write metrics until `stop`, and return the addresses where they can be read.

        Args:
            factories: Open the outputs.
            options: The server's options.
            version: Of this distribution.

        Raises:
            DjinnError: An output cannot be opened.
        """
        try:
            self._outputs = Outputs(factories, options,
                                    ServerMetrics(version, self._supervisor.ledger, self.why_not_ready))
        except DjinnError:
            self.stop()
            raise
        return self._outputs.addresses

    def start(self) -> None:
        """Start accepting connections, and wait for the first worker. Clients that connect meanwhile wait for it, too.

        Raises:
            DjinnError: The first worker cannot start.
        """
        self._loop.start()
        self._acceptor.start()
        if (first := self._authentication.tenant) is not None:
            try:
                self._supervisor.worker_of(first, patience_s=None, is_first=True)
            except BaseException:
                self.stop()
                raise
        self._loop.spawn(self.watch.run)
        self._loop.spawn(self._runs.run)
        if self._operator is not None:
            self._loop.spawn(self._operator.run)
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
        self._loop.stop()
        if self._operator is not None:
            self._operator.close()
        self._listener.close()
        self._room.close()
        ended = self._supervisor.stop(timeout_s)
        if self._outputs is not None:
            self._outputs.stop()
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
        check_versions(greeting)
        if isinstance(greeting, PeerHello):
            self._supervisor.worker_with(greeting.mailbox).take(channel, sequence, greeting)
            return
        with self._rejecting("token"):
            client = self._authentication.authenticate(greeting.token, resumes=bool(greeting.resume))
        tenant = client.tenant
        self._room.leave(channel)
        channel.greeted()
        if greeting.resume:
            self._verdicts.check(greeting.resume)
        else:
            with self._rejecting("offender"):
                self._supervisor.offenders.check(greeting.owner)
            with self._rejecting("admission"):
                self._admission.admit(tenant, self._supervisor.load(tenant))
        with self._rejecting("worker"):
            # The values of a dead worker are lost, so a client that wants to resume need not wait for the next worker.
            worker = (self._supervisor.present_worker(tenant) if greeting.resume
                      else await_worker(self._supervisor, tenant,
                                        lambda waited_s: channel.send(sequence, Starting(waited_s))))
        # The token was valid when the client connected, and may have ended while the worker was starting.
        self._authentication.check_current(client)
        worker.take(channel, sequence, greeting, client.token)
        self.watch.let_in(client)

    @contextlib.contextmanager
    def _rejecting(self, reason: Reason) -> Iterator[None]:
        """Count refused clients."""
        try:
            yield
        except (LimitError, RefusedError):
            self._counts.reject(reason)
            raise
