"""What transports can do besides connecting: listen, move connections, carry values between servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from djinn.kinds.transport import Connection, ConnectOptions, Transport
from djinn.wire.messages import Message, PeerHello, Result, ValueTransfer
from djinn_plugins.common.options import ListenOptions

LaterReply: TypeAlias = "tuple[tuple[int, ...], Result | None, list[torch.Tensor]]"
"""Handles that one batch has asked for, and their values; ``None`` if they are lost and must be asked for again."""


@runtime_checkable
class SupportsResumption(Connection, Protocol):
    """Optional property of a `Connection` whose session outlives the underlying network connection.

    Laws:
        transport.exactly_once, transport.resumed
    """

    @property
    def reconnections(self) -> int:
        """How often the session has resumed on a new connection."""


@runtime_checkable
class SupportsProgress(Connection, Protocol):
    """Optional properties of a `Connection` that say how far its transfers are. Read by another thread, at any time."""

    @property
    def sending_bytes(self) -> int:
        """Value of ``bytes_sent`` when all tensors that were handed over have been sent."""

    @property
    def receiving_bytes(self) -> int:
        """Value of ``bytes_received`` when the tensors of the arriving answer are complete."""


@runtime_checkable
class SupportsLaterValues(Protocol):
    """Optional method of a `Connection` that fetches values while the client continues.

    Laws:
        session.later_exact
    """

    def later_values(self) -> list[LaterReply] | None:
        """Return the values of `djinn.wire.messages.Batch.later` that have arrived, without waiting for others.

        Returns:
            The replies since the last call, in the order of the batches. ``None`` if the connection cannot do this;
            then no batch may ask.

        Raises:
            TransportError: The connection is lost.
        """


@runtime_checkable
class SupportsCertificate(Protocol):
    """Optional property of a `Connection` whose server presented a certificate."""

    @property
    def certificate_expires_s(self) -> float | None:
        """When the server's certificate expires, in seconds since 1970; ``None`` if it presented none."""


class Channel(Protocol):
    """The server's end of one connection."""

    peer: str

    def receive(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Wait for the next message.

        Returns:
            Its sequence number, the message and its tensors; ``None`` at an orderly end.

        Raises:
            ProtocolError: The stream is malformed; nothing more can be read from it.
            TransportError: The connection broke or made no progress.
        """

    def send(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message with its tensors."""

    def greeted(self) -> None:
        """Lift the limits for new connections: the other side has identified itself."""

    def close(self) -> None:
        """Close the connection. Never raises; may be called twice or from another thread."""


@runtime_checkable
class SupportsHandover(Channel, Protocol):
    """Optional method of a `Channel` that another process can take over."""

    def detach(self, sequence: int, message: Message) -> tuple[int, bytes]:
        """Give up the connection without closing it. The channel is unusable afterwards.

        Args:
            sequence: Number of the only message received so far.
            message: That message; the process that takes over receives it again in this form.

        Returns:
            The connection's file descriptor, which the caller then owns; and bytes that were already read from it.
        """


@runtime_checkable
class SupportsByteCounts(Protocol):
    """Optional properties of a `Channel` that counts bytes."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far by this process."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far by this process."""


@runtime_checkable
class SupportsDigests(Channel, Protocol):
    """Optional property of a `Channel` that distinguishes a repeated message from a different one."""

    @property
    def received_digest(self) -> int:
        """Distinguishes the last message received, including the length of its tensors, from all others."""


@runtime_checkable
class SupportsReceiveLimit(Channel, Protocol):
    """Optional attribute of a `Channel` that checks a frame before it receives tensors."""

    admit_body: Callable[[int], None] | None
    """Called with the length of a frame's body, in bytes, before memory is allocated for it. It may wait, or raise a
    `LimitError` so that the body is not read; the connection is unusable afterwards.
    """


class Listener(Protocol):
    """Accepts connections.

    Laws:
        transport.listener_closes
    """

    address: str
    """Address that clients connect to."""

    def accept(self) -> Channel | None:
        """Wait for a connection; ``None`` once the listener is closed."""

    def close(self) -> None:
        """Stop accepting. Never raises; may be called twice or from another thread."""


@runtime_checkable
class SupportsAsyncAccept(Listener, Protocol):
    """Optional method of a `Listener` that an event loop of anyio can wait for. Other listeners wait in a thread.

    Laws:
        transport.awaited_handshakes, transport.awaits_end
    """

    async def accept_async(self) -> Channel | None:
        """Wait for a connection; ``None`` once the listener is closed.

        Cancelling ends the wait and loses no connection. Other threads do not call `close` while a task waits.
        """


@runtime_checkable
class SupportsAsyncHandshake(Channel, Protocol):
    """Optional methods of a `Channel` whose handshake occupies no thread.

    Tensors always travel by the blocking methods, which continue where these end. Cancelling ends the wait; the channel
    can then only be closed.

    Laws:
        transport.awaited_handshakes, transport.awaits_end
    """

    async def receive_async(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Wait for the first message, which has no tensors. Limits and errors are those of `Channel.receive`."""

    async def send_async(self, sequence: int, message: Message) -> None:
        """Send a message without tensors. Limits and errors are those of `Channel.send`."""


@runtime_checkable
class ListeningTransport(Transport, Protocol):
    """Optional method of a `Transport` with which a server can listen."""

    def listen(self, address: str, options: ListenOptions) -> Listener:
        """Listen on an address.

        Raises:
            TransportError: The address cannot be bound.
            ConfigurationError: The address is invalid, or this transport has no listening side.
        """


@runtime_checkable
class SupportsAdoption(Protocol):
    """Optional method of a `Transport` whose channels implement `SupportsHandover`."""

    def adopt(self, descriptor: int, received: bytes, peer: str, options: ListenOptions) -> Channel:
        """Take over a connection from `SupportsHandover.detach`, in any process.

        Args:
            descriptor: Its file descriptor, which the channel then owns.
            received: Bytes that were already read from it.
            peer: Address of the other end.
            options: As for `Transport.listen`.
        """


class PeerConnection(Protocol):
    """The sending end of a peer's connection, which carries values from session to session.

    Concurrency:
        One thread at a time; any thread may call `close`.
    """

    def send(self, transfer: ValueTransfer, tensors: Sequence[torch.Tensor]) -> None:
        """Send a transfer with its tensor, if it has one.

        Raises:
            TransportError: The connection is lost.

        Ownership:
            The tensors may change once this returns.
        """

    def close(self, drain_s: float = 0.0) -> None:
        """End the connection. Never raises; may be called twice.

        Args:
            drain_s: How long pending sends may take.
        """


@runtime_checkable
class SupportsPeers(Transport, Protocol):
    """Optional method of a `Transport` that carries values from server to server."""

    def connect_peer(self, address: str, peer: PeerHello, options: ConnectOptions) -> PeerConnection:
        """Connect to another server and greet it as a peer.

        Raises:
            TransportError: There is no answer at that address.
            RefusedError, ProtocolVersionError: The server refuses.
            ConfigurationError: The address is invalid.

        Laws:
            transport.transfers
        """


@runtime_checkable
class MovablePeerConnection(PeerConnection, Protocol):
    """Optional method of a `PeerConnection` that another process can take over."""

    def detach(self) -> tuple[int, bytes]:
        """Give up the connection, on which only the greeting has been sent. The carrier is unusable afterwards.

        Returns:
            The connection's file descriptor, which the caller then owns; and bytes that were already read from it.

        Raises:
            TransportError: The connection was closed.
        """


@runtime_checkable
class SupportsPeerRelay(Protocol):
    """Optional method of a `SupportsPeers` whose carriers implement `MovablePeerConnection`."""

    def adopt_peer(self, descriptor: int, received: bytes, address: str, options: ConnectOptions) -> PeerConnection:
        """Send on a connection from `MovablePeerConnection.detach`, in any process.

        Args:
            descriptor: Its file descriptor, which the carrier then owns.
            received: Bytes that were already read from it.
            address: The address that it leads to.
            options: As for `SupportsPeers.connect_peer`.
        """
