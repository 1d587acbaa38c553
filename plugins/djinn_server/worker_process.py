"""A worker's process, as the gateway sees it."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from djinn_lib_service.kinds.transport import Channel, SupportsHandover

from djinn import errors
from djinn.errors import DjinnError, TransportError
from djinn.wire.messages import Hello, PeerHello, Redirect
from djinn_server.board import Board
from djinn_server.certificates import make_pair, why_none
from djinn_server.control import (
    Ask,
    Control,
    Dial,
    Drained,
    Failed,
    GiveBack,
    Incoming,
    Look,
    Ready,
    Seen,
    SessionState,
    Setup,
)
from djinn_server.counters import WorkerReport
from djinn_server.device_leases import LeaseClient, LeaseManager
from djinn_server.dialing import Exchange
from djinn_server.forkserver import Child, ForkServer
from djinn_server.tickets import issue

__all__ = ("START_TIMEOUT_S", "Worker")

START_TIMEOUT_S = 120.0
"""How long a worker may take to start; initializing a device can be slow."""
_CODES = {kind.code: kind for kind in (getattr(errors, name) for name in errors.__all__)}
_log = logging.getLogger("djinn.server")


class Worker:
    """A worker process.

    Args:
        setup: Its configuration.
        environment: Its environment variables.
        forkserver: Forks the process, if there is one.

    Attributes:
        mailbox_prefix: Prefix of the keys of its mailboxes.
        board: Shows which session's program it runs.
        cause: Why the gateway killed it, if it did.
        pair: Its own certificate and key, as PEM; empty if it uses the server's.

    Raises:
        OSError: The process could not be started.
    """

    def __init__(self, setup: Setup, environment: dict[str, str], forkserver: ForkServer | None = None) -> None:
        self._key = setup.ticket_key
        self.mailbox_prefix = setup.mailbox_prefix
        self.board, descriptor = Board.create()
        self.cause = ""
        self._certificate = self.pair = ""
        if setup.options.tls.cert and not why_none():
            pair = make_pair()
            self._certificate, self.pair = pair.certificate, pair.certificate + pair.key
            setup = msgspec.structs.replace(setup, tls_pair=self.pair)
        self._port = ""
        self._looking = threading.Lock()
        self._looks = 0
        self._seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        try:
            self._process, ours = _begin(environment, forkserver)
            self._control = Control(ours)
            self._control.send(setup, descriptor)
        finally:
            os.close(descriptor)

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    def await_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DjinnError: It could not start, or died.
        """
        patience = threading.Timer(START_TIMEOUT_S, self._process.kill)
        patience.daemon = True
        patience.start()
        received = self._control.receive()
        patience.cancel()
        message = received[0] if received is not None else None
        if isinstance(message, Failed):
            raise _CODES.get(message.code, DjinnError)(message.summary, hint=message.hint)
        if not isinstance(message, Ready):
            raise TransportError("A worker died before it could begin.", hint="See the server's log for the reason.")
        self._port = message.address.rpartition(":")[2]

    def watch(self, heed: Callable[[WorkerReport], None], desk: LeaseManager, customer: LeaseClient,
              drained: Callable[[], None], exchange: Exchange | None = None) -> None:
        """Handle its messages until it ends."""
        while (received := self._control.receive()) is not None:
            message = received[0]
            if isinstance(message, Ask):
                desk.ask(customer)
            elif isinstance(message, GiveBack):
                desk.give_back(customer, message.turn, wants_more=message.wants_more)
            elif isinstance(message, Dial) and exchange is not None:
                exchange.connect(message, self._control)
            elif isinstance(message, WorkerReport):
                heed(message)
            elif isinstance(message, Drained):
                drained()
            elif isinstance(message, Seen):
                self._seen.put(message)

    def look(self, timeout_s: float) -> tuple[SessionState, ...] | None:
        """Request the state of its sessions; ``None`` if it does not answer in time."""
        with self._looking:
            self._looks += 1
            self.tell(Look(self._looks))
            deadline = time.monotonic() + timeout_s
            while True:
                try:
                    seen = self._seen.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    return None
                if seen.number == self._looks:
                    return seen.sessions

    def is_stopped(self) -> bool:
        """Whether the process is stopped, as far as the system can tell."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            # Not every system shows this; the thread that waits for the process notices if it is gone.
            return False
        return state in "TtZX"

    def take(self, channel: Channel, sequence: int, greeting: Hello | PeerHello, token: bytes = b"") -> None:
        """Pass an admitted client or peer to the worker: hand its connection over, or else redirect it."""
        try:
            if not self._port and isinstance(channel, SupportsHandover):
                if isinstance(greeting, Hello):
                    greeting = msgspec.structs.replace(greeting, token="")
                descriptor, received = channel.detach(sequence, greeting)
                try:
                    self._control.send(Incoming(channel.peer, received, token), descriptor)
                finally:
                    os.close(descriptor)
            else:
                channel.send(sequence, Redirect(f":{self._port}", issue(self._key, token), self._certificate))
        except OSError as error:
            raise TransportError(f"The worker {self.pid} takes nobody in: {error}.") from None

    def tell(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Send it a message, optionally with a descriptor; a worker that is gone is ignored."""
        try:
            self._control.send(message, descriptor)  # type: ignore[arg-type]  # of the kinds that `Control` knows
        except OSError as error:
            _log.info("worker %d receives nothing: %s", self.pid, error)

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()

    def end(self, cause: str) -> None:
        """Kill it, and record the cause for the count of restarts."""
        self.cause = cause
        self.kill()

    def reap(self) -> int:
        """Wait for its end, and return its status as `subprocess` does."""
        status = self._process.wait()
        self._control.close()
        return status


def _begin(
    environment: dict[str, str], forkserver: ForkServer | None
) -> tuple[Child | subprocess.Popen[bytes], socket.socket]:
    """Start a worker's process: forked if possible, because importing PyTorch takes seconds.

    Returns:
        The process, and the gateway's end of the channel to it. No other process ever gets the worker's end.

    Raises:
        OSError: It could not be started.
    """
    if forkserver is not None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return forkserver.spawn(theirs.fileno(), environment), ours
            except OSError as error:
                _log.warning("workers begin more slowly from now on: %s", error)
                # A fork that arrives after this reads end of file, and exits.
                ours.shutdown(socket.SHUT_RDWR)
                ours.close()
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # Its standard output must not be the gateway's, on which callers expect one line. NumPy's threads, which
            # the worker does not need, would stay outside the sandbox.
            process = subprocess.Popen([sys.executable, "-P", "-m", "djinn_server.worker"], stdin=theirs.fileno(),
                                       stdout=2, env=environment | {"OPENBLAS_NUM_THREADS": "1"})
        except OSError:
            ours.close()
            raise
    return process, ours
