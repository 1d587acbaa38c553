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

from djinn import errors
from djinn.errors import DjinnError, TransportError
from djinn.kinds.transport import Channel, MovableChannel
from djinn.wire.messages import Courier, Hello, Redirect
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
from djinn_server.counting import Report
from djinn_server.desk import Customer, Desk
from djinn_server.dialing import Exchange
from djinn_server.nursery import Child, Nursery
from djinn_server.tickets import issue

__all__ = ("START_TIMEOUT_S", "Worker")

START_TIMEOUT_S = 120.0
"""How long a worker may take to begin: a device may have to wake up."""
_CODES = {kind.code: kind for kind in (getattr(errors, name) for name in errors.__all__)}
_log = logging.getLogger("djinn.server")


class Worker:
    """A worker process.

    Args:
        setup: What it is for.
        environment: Its environment variables.
        nursery: Forks it, if there is one.

    Attributes:
        mailbox_prefix: How the keys of its mailboxes begin.
        board: Whose program it runs.
        cause: Why it was killed, if it was the gateway that did.
        pair: Certificate and key of its own, as PEM; empty if it has the server's.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, setup: Setup, environment: dict[str, str], nursery: Nursery | None = None) -> None:
        self._key = setup.ticket_key
        self.mailbox_prefix = setup.mailbox_prefix
        self.board, descriptor = Board.create()
        self.cause = ""
        self._certificate = self.pair = ""
        if setup.tls_cert and not why_none():
            pair = make_pair()
            self._certificate, self.pair = pair.certificate, pair.certificate + pair.key
            setup = msgspec.structs.replace(setup, tls_cert="", tls_key="", tls_pair=self.pair)
        self._port = ""
        self._looking = threading.Lock()
        self._looks = 0
        self._seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        try:
            self._process, ours = _begin(environment, nursery)
            self._control = Control(ours)
            self._control.send(setup, descriptor)
        finally:
            os.close(descriptor)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def await_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DjinnError: It cannot, or died.
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

    def watch(self, heed: Callable[[Report], None], desk: Desk, customer: Customer,
              drained: Callable[[], None], exchange: Exchange | None = None) -> None:
        """Wait until it ends, and hear what it tells meanwhile."""
        while (received := self._control.receive()) is not None:
            message = received[0]
            if isinstance(message, Ask):
                desk.ask(customer)
            elif isinstance(message, GiveBack):
                desk.give_back(customer, message.turn, wants_more=message.wants_more)
            elif isinstance(message, Dial) and exchange is not None:
                exchange.connect(message, self._control)
            elif isinstance(message, Report):
                heed(message)
            elif isinstance(message, Drained):
                drained()
            elif isinstance(message, Seen):
                self._seen.put(message)

    def look(self, timeout_s: float) -> tuple[SessionState, ...] | None:
        """Ask what its sessions do; ``None`` if it does not say so in time."""
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
        """Whether the process stands still, as far as the system tells."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            # Not every system tells; a process that is gone is noticed by whoever waits for it.
            return False
        return state in "TtZX"

    def take(self, channel: Channel, sequence: int, greeting: Hello | Courier, token: bytes = b"") -> None:
        """Give it a client or courier that was let in: the connection itself if that can be, or else the next one.

        Args:
            channel: Its connection.
            sequence: Number of the greeting's frame.
            greeting: The greeting.
            token: By which token it was let in.

        Raises:
            TransportError: It is gone.
        """
        try:
            if not self._port and isinstance(channel, MovableChannel):
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
        """Send it a message, and a descriptor with it, if it is there to receive one."""
        try:
            self._control.send(message, descriptor)  # type: ignore[arg-type]  # of the kinds that `Control` knows
        except OSError as error:
            _log.info("worker %d receives nothing: %s", self.pid, error)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def end(self, cause: str) -> None:
        """Kill it, for a reason that is counted."""
        self.cause = cause
        self.kill()

    def reap(self) -> int:
        """Wait for its end, and return its status as `subprocess` gives it."""
        status = self._process.wait()
        self._control.close()
        return status


def _begin(
    environment: dict[str, str], nursery: Nursery | None
) -> tuple[Child | subprocess.Popen[bytes], socket.socket]:
    """Begin a worker's process: forked if that can be, since otherwise it takes seconds to import PyTorch.

    Returns:
        The process, and the gateway's end of the channel to it, whose other end no second process ever gets.

    Raises:
        OSError: It could not be started.
    """
    if nursery is not None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return nursery.spawn(theirs.fileno(), environment), ours
            except OSError as error:
                _log.warning("workers begin more slowly from now on: %s", error)
                # A fork that comes late all the same reads the end of this, and ends.
                ours.shutdown(socket.SHUT_RDWR)
                ours.close()
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # Its standard output is not this process's, of which callers expect one line. NumPy's threads, which nobody
            # uses there, would stay out of the sandbox.
            process = subprocess.Popen([sys.executable, "-P", "-m", "djinn_server.worker"], stdin=theirs.fileno(),
                                       stdout=2, env=environment | {"OPENBLAS_NUM_THREADS": "1"})
        except OSError:
            ours.close()
            raise
    return process, ours
