"""A worker's process, as the gateway sees it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import attrs
import msgspec

from djinn import errors
from djinn.errors import DjinnError, TransportError
from djinn.wire.messages import Hello, PeerHello, Redirect
from djinn_plugins.common.kinds.transport import Channel, SupportsHandover
from djinn_plugins.server.abilities import supports
from djinn_plugins.server.board import Board
from djinn_plugins.server.certificates import Pair, make_pair, why_none
from djinn_plugins.server.changes import Changes
from djinn_plugins.server.control import (
    ControlMessage,
    Dial,
    Drained,
    Failed,
    FindNamed,
    FromStore,
    Incoming,
    Look,
    Ready,
    Seen,
    SessionState,
    Setup,
    SharedUse,
    Taken,
    TurnChannel,
)
from djinn_plugins.server.control_channel import FROM_WORKER, AwaitedControl
from djinn_plugins.server.counters import WorkerReport
from djinn_plugins.server.dialing import Exchange
from djinn_plugins.server.handshake import send_to
from djinn_plugins.server.models import GatewayModels
from djinn_plugins.server.shared_uploads import GatewayUploads
from djinn_plugins.server.spawning import ForkServer, WorkerProcess, start_process
from djinn_plugins.server.tenants import Tenant
from djinn_plugins.server.tickets import issue
from djinn_plugins.server.upload_messages import UploadRequest

__all__ = ("START_TIMEOUT_S", "Connected", "Worker")

START_TIMEOUT_S = 120.0
"""How long a worker may take to start; initializing a device can be slow."""
TAKE_TIMEOUT_S = 5.0
"""How long to keep a connection for the next worker while this one does not say that it takes it."""
_CODES = {kind.code: kind for kind in (getattr(errors, name) for name in errors.__all__)}
_log = logging.getLogger("djinn.server")


@attrs.frozen
class Connected:
    """A connection whose client was admitted.

    Attributes:
        descriptor: Its descriptor, which the holder closes.
        peer: The address at the other end.
        received: The bytes already read from it, the greeting included.
        token: The token that admitted its client.
    """

    descriptor: int
    peer: str
    received: bytes
    token: bytes

    @classmethod
    def of(cls, channel: SupportsHandover, sequence: int, greeting: Hello | PeerHello, token: bytes) -> Self:
        """Take a connection from its channel.

        Raises:
            TransportError: It was closed.
        """
        if isinstance(greeting, Hello):
            greeting = msgspec.structs.replace(greeting, token="")
        descriptor, received = channel.detach(sequence, greeting)
        return cls(descriptor, channel.peer, received, token)


class Worker:
    """A worker process.

    Args:
        setup: Its configuration.
        process: The process.
        control: The channel to it.
        board: Shows which session's program it runs.
        pair: Its own certificate and key; ``None`` if it uses the server's.
        turns: The gateway's end of the channel for its turns, if it takes turns.

    Attributes:
        mailbox_prefix: Prefix of the keys of its mailboxes.
        board: As above.
        cause: Why the gateway killed it, if it did.
        pair: Its own certificate and key, as PEM; empty if it uses the server's.
        turns: As above; the caller that takes it owns it.

    Concurrency:
        Tasks of one event loop; any thread calls `is_stopped` and `kill`.
    """

    def __init__(self, setup: Setup, process: WorkerProcess, control: AwaitedControl, board: Board, pair: Pair | None,
                 turns: socket.socket | None) -> None:
        self.mailbox_prefix = setup.mailbox_prefix
        self.board = board
        self.cause = ""
        self.pair = setup.tls_pair
        self.turns = turns
        self._key = setup.ticket_key
        self._certificate = "" if pair is None else pair.certificate
        self._process = process
        self._control = control
        self._port = ""
        self._looking = anyio.Lock()
        self._looks = 0
        self._seen: Seen | None = None
        self._has_seen: anyio.Event | None = None
        """Set by the answer to a `look`; ``None`` if there is no `look`."""
        self._handed = 0
        self._not_taken: set[int] = set()
        """Numbers of connections that were handed over and not taken yet."""
        self._changes = Changes()
        self._is_gone = False

    @classmethod
    async def begin(cls, setup: Setup, environment: dict[str, str], forkserver: ForkServer | None = None,
                    use: tuple[SharedUse, int] | None = None) -> Self:
        """Start a process, and send it its configuration.

        Args:
            setup: The configuration.
            environment: Its environment variables.
            forkserver: Forks the process, if there is one.
            use: What the workers of its tenant use together, and the descriptor of that.

        Raises:
            OSError: The process could not be started.
        """
        pair = None
        if setup.options.tls.cert and not why_none():
            pair = await anyio.to_thread.run_sync(make_pair)
            setup = msgspec.structs.replace(setup, tls_pair=pair.certificate + pair.key)
        board, descriptor = Board.create()
        turns, theirs = socket.socketpair() if setup.takes_turns else (None, None)
        process: WorkerProcess | None = None
        try:
            process, ours = await start_process(environment, forkserver)
            control = AwaitedControl(ours, messages=FROM_WORKER)
            await control.send(setup, descriptor)
            if theirs is not None:
                await control.send(TurnChannel(), theirs.fileno())
            if use is not None:
                await control.send(*use)
            return cls(setup, process, control, board, pair, turns)
        except BaseException:
            if process is not None:
                process.kill()
            raise
        finally:
            os.close(descriptor)
            if theirs is not None:
                theirs.close()

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    async def await_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DjinnError: It could not start, or died.
        """
        message: ControlMessage | None = None
        with anyio.move_on_after(START_TIMEOUT_S):
            received = await self._control.receive()
            message = received[0] if received is not None else None
        if isinstance(message, Failed):
            raise _CODES.get(message.code, DjinnError)(message.summary[:4000], hint=message.hint[:4000])
        if not isinstance(message, Ready):
            raise TransportError("A worker died before it could begin.", hint="See the server's log for the reason.")
        self._port = message.address.rpartition(":")[2]

    async def watch(self, heed: Callable[[WorkerReport], None], drained: Callable[[], None],
                    exchange: Exchange | None = None, models: GatewayModels | None = None,
                    uploads: GatewayUploads | None = None, tenant: Callable[[], Tenant] = Tenant,
                    find_named: Callable[[FindNamed, AwaitedControl], None] | None = None) -> None:
        """Handle its messages until it ends; ``tenant`` returns its tenant as it is now."""
        while (received := await self._control.receive()) is not None:
            message = received[0]
            if isinstance(message, Taken):
                self._not_taken.discard(message.number)
                self._changes.notify()
            elif isinstance(message, Dial) and exchange is not None:
                exchange.connect(message, self._control)
            elif isinstance(message, FromStore) and models is not None:
                models.answer(message, self._control, tenant())
            elif isinstance(message, UploadRequest) and uploads is not None:
                uploads.answer(message, self._control, tenant())
            elif isinstance(message, WorkerReport):
                heed(message)
            elif isinstance(message, Drained):
                drained()
            elif isinstance(message, Seen) and message.number == self._looks and self._has_seen is not None:
                self._seen = message
                self._has_seen.set()
            elif isinstance(message, FindNamed) and find_named is not None:
                find_named(message, self._control)
        if uploads is not None:
            uploads.leave(self._control)
        self._is_gone = True
        self._changes.notify()

    def charged_to_others(self, uploads: GatewayUploads) -> int:
        """Return how many bytes of its uploads are charged to other workers."""
        return uploads.charged_to_others(self._control)

    async def look(self, timeout_s: float) -> tuple[SessionState, ...] | None:
        """Request the state of its sessions; ``None`` if it does not answer in time."""
        seen = await self.look_at_all(timeout_s)
        return None if seen is None else seen.sessions

    async def look_at_all(self, timeout_s: float) -> Seen | None:
        """Request the state of its sessions, and of named ones; ``None`` if it does not answer in time."""
        async with self._looking:
            self._looks += 1
            self._has_seen = anyio.Event()
            try:
                with anyio.move_on_after(timeout_s):
                    await self.tell(Look(self._looks))
                    await self._has_seen.wait()
                return self._seen
            finally:
                # What a worker says is not kept.
                self._seen = self._has_seen = None

    def is_stopped(self) -> bool:
        """Whether the process is stopped, as far as the system can tell."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            # Not every system shows this; the task that waits for the process notices if it is gone.
            return False
        return state in "TtZX"

    def takes_over(self, channel: Channel) -> bool:
        """Whether a connection can be handed over, rather than its client redirected."""
        return not self._port and supports(channel, SupportsHandover)

    async def redirect(self, channel: Channel, sequence: int, token: bytes) -> None:
        """Send an admitted client to the worker's own address.

        Raises:
            TransportError: The connection broke.
        """
        await send_to(channel, sequence, Redirect(f":{self._port}", issue(self._key, token), self._certificate))

    async def take(self, connection: Connected) -> bool:
        """Hand the connection of an admitted client or peer over.

        Returns:
            Whether the worker has taken it. If it has died before, it has answered nothing.
        """
        self._handed += 1
        number = self._handed
        self._not_taken.add(number)
        message = Incoming(connection.peer, connection.received, connection.token, number)
        try:
            await self._control.send(message, connection.descriptor)
            # A worker that stands still keeps its copy of the connection.
            await self._changes.wait_for(lambda: number not in self._not_taken or self._is_gone, TAKE_TIMEOUT_S)
        except OSError as error:
            _log.info("worker %d takes nobody in: %s", self.pid, error)
            return False
        finally:
            taken = number not in self._not_taken
            self._not_taken.discard(number)
        return taken or not self._is_gone

    async def tell(self, message: ControlMessage, descriptor: int | None = None) -> None:
        """Send it a message, optionally with a descriptor; a worker that is gone is ignored."""
        try:
            await self._control.send(message, descriptor)
        except OSError as error:
            _log.info("worker %d receives nothing: %s", self.pid, error)

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()

    def end(self, cause: str) -> None:
        """Kill it, and record the cause for the count of restarts."""
        self.cause = cause
        self.kill()

    async def reap(self) -> int:
        """Wait for its end, and return its status as `subprocess` does."""
        status = await self._process.wait()
        self._control.close()
        return status
