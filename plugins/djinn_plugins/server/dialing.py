"""Connections to other servers: the gateway opens them for its workers, which may not connect themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread

from djinn import errors
from djinn.errors import DjinnError, PeerError
from djinn.kinds.transport import ConnectOptions, Transport
from djinn.wire.messages import PeerHello
from djinn_plugins.common.kinds.transport import MovablePeerConnection, SupportsPeerRelay, SupportsPeers
from djinn_plugins.server.control import Dial, Dialed
from djinn_plugins.server.control_channel import AwaitedControl
from djinn_plugins.server.event_loop import Tasks
from djinn_plugins.server.peers import CONNECT_TIMEOUT_S, PeerPolicy
from djinn_plugins.server.pending_replies import PendingReplies

__all__ = ("Dialer", "Exchange")

MAX_DIALS = 64
"""Maximum number of connections being opened for all workers together; further requests wait."""
MARGIN_S = 2 * CONNECT_TIMEOUT_S
"""Additional time that a worker waits for the gateway, which may resolve a name first."""
_CODES = {kind.code: kind for kind in (getattr(errors, name) for name in errors.__all__)}


class Dialer:
    """The worker's end: requests connections from the gateway.

    Args:
        send: Sends the gateway a message.

    Concurrency:
        Any thread.
    """

    def __init__(self, send: Callable[[Dial], None]) -> None:
        self._replies = PendingReplies[Dial, Dialed](send, CONNECT_TIMEOUT_S + MARGIN_S)
        self.answered = self._replies.answered

    def dial(self, address: str, peer: PeerHello) -> tuple[int, bytes]:
        """Request a connection to another server, greeted by the gateway.

        Returns:
            The connection's descriptor, and the bytes already read from it.

        Raises:
            PeerError: The server may not be connected to.
            DjinnError: The connection failed.
        """
        found = self._replies.ask(lambda number: Dial(number, address, peer))
        if found is None:
            raise PeerError(f"{address} cannot be reached from here: the gateway does not answer.")
        answer, descriptor = found
        if descriptor is None:
            raise _CODES.get(answer.code, PeerError)(answer.summary, hint=answer.hint)
        return descriptor, answer.received


class Exchange:
    """The gateway's end: opens connections to permitted servers.

    The gateway sends the greeting itself. So a worker can only get connections to mailboxes of djinn servers.

    Args:
        rules: Which servers are permitted.
        transport_for: Returns the transport of a scheme.
        tasks: Where requests wait.

    Concurrency:
        Tasks of one event loop.
    """

    def __init__(self, rules: PeerPolicy, transport_for: Callable[[str], Transport], tasks: Tasks) -> None:
        self._rules = rules
        self._tasks = tasks
        self._transport_for = transport_for
        self._threads = anyio.CapacityLimiter(MAX_DIALS)

    def connect(self, wish: Dial, control: AwaitedControl) -> None:
        """Open a connection and send it to the worker; returns at once."""
        control.question(self._tasks, partial(self._dialed, wish))

    async def _dialed(self, wish: Dial) -> tuple[Dialed, int | None]:
        try:
            descriptor, received = await anyio.to_thread.run_sync(
                self._open, wish.address, wish.peer, limiter=self._threads, abandon_on_cancel=True)
        except DjinnError as error:
            return Dialed(wish.number, error.code, error.summary, error.hint), None
        return Dialed(wish.number, received=received), descriptor

    def _open(self, address: str, peer: PeerHello) -> tuple[int, bytes]:
        transport = self._transport_for(address.partition("://")[0])
        if not isinstance(transport, SupportsPeerRelay) or not isinstance(transport, SupportsPeers):
            raise PeerError(f"{address} is reached by transport {transport.name!r}, whose connections cannot be handed "
                            "over.", hint="Bring the value home and upload it there.")
        carrier = transport.connect_peer(self._rules.permit(address), peer,
                                  ConnectOptions(connect_timeout_s=CONNECT_TIMEOUT_S))
        if isinstance(carrier, MovablePeerConnection):
            return carrier.detach()
        carrier.close()
        raise PeerError(f"The connection to {address} cannot be handed over.")
