"""Transports carry batches to an executor, and answers back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch

from djinn.kinds.executor import Executor
from djinn.settings import Settings
from djinn.wire.messages import Batch, Message, Parcel, PeerHello, Result, Welcome

PINNED_NAME = "worker.djinn.invalid"
"""The name in pinned certificates. It is never resolved: a client trusts exactly one certificate."""


@attrs.frozen
class ConnectOptions:
    """Options for a transport's `connect`."""

    token: str = ""
    connect_timeout_s: float = 10.0
    request_timeout_s: float | None = None
    """How long an answer may make no progress; ``None``: no limit while the server is alive."""
    settings: Settings = attrs.field(factory=Settings)
    """All settings of the session."""
    tls_pin: str = ""
    """The certificate, as PEM, that the server must present for `PINNED_NAME`, regardless of the trusted authorities;
    empty for any certificate that they have signed.
    """
    open_executor: Callable[[], Executor] | None = None
    """Opens an executor in this process, for transports without a server."""
    is_gone: Callable[[], bool] | None = None
    """Whether a `PeerConnection` is no longer needed; checked while a transfer makes no progress."""


@attrs.frozen
class ListenOptions:
    """Options for a transport's `listen`."""

    greeting_timeout_s: float = 5.0
    """How long a new connection may take to identify itself."""
    progress_timeout_s: float = 30.0
    """How long a started frame may make no progress."""
    max_body_bytes: int = 16 * 2**30
    """Largest body of one frame."""
    tls_cert: str = ""
    """File with the server's certificate, for encrypted connections."""
    tls_key: str = ""
    """File with its key; empty if the certificate file contains it."""
    tls_client_ca: str = ""
    """File with the authorities that must sign clients' certificates, or these authorities' certificates as PEM; empty
    to require no client certificates.
    """


class Connection(Protocol):
    """The client's end of a session.

    Concurrency:
        One thread at a time; the session ensures that.

    Laws:
        transport.batch_order, transport.tensors_exact, transport.one_reply_per_request, transport.ownership,
        transport.sessions_separate, transport.closed_is_final, transport.counters_monotonic
    """

    address: str
    welcome: Welcome
    flush_every: int
    """Pending operations that are worth sending before a value is requested: few if the other side can work
    meanwhile.
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far; 0 if nothing is transmitted."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far; 0 if nothing is transmitted."""

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that requests no answer.

        Args:
            batch: The commands.
            tensors: One dense CPU tensor per upload, in order. They may change once this returns.

        Raises:
            TransportError: The connection is lost; the error names the address.
        """

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer.

        Returns:
            The answer, and one CPU tensor per `TensorHeader` in it, owned by the caller.

        Raises:
            TransportError: The connection is lost, or no answer arrived in time; the error names the address.
        """

    def close(self) -> None:
        """End the session. Never raises; may be called twice."""


@runtime_checkable
class ResumingConnection(Connection, Protocol):
    """Optional property of a `Connection` whose session outlives the underlying network connection.

    Laws:
        transport.exactly_once, transport.resumed
    """

    @property
    def reconnections(self) -> int:
        """How often the session has resumed on a new connection."""


@runtime_checkable
class CancellingConnection(Connection, Protocol):
    """Optional method of a `Connection` that cancels the batches sent so far.

    Where interrupts are deferred (see `djinn.session.interrupts`), an interrupt ends the waiting in `submit` and
    `request`. The batch then counts as sent.
    """

    def cancel(self) -> None:
        """Cancel the programs sent so far: none of them begins, and a running one ends after its current step.

        Returns soon, even if the running step takes long. All other commands are executed. Values that are not computed
        have a failure of the kind `djinn.errors.OperationCancelledError`.
        """


@runtime_checkable
class CertifiedConnection(Protocol):
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
class MovableChannel(Channel, Protocol):
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
class CountedChannel(Protocol):
    """Optional properties of a `Channel` that counts bytes."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far by this process."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far by this process."""


@runtime_checkable
class DigestingChannel(Channel, Protocol):
    """Optional property of a `Channel` that distinguishes a repeated message from a different one."""

    @property
    def received_digest(self) -> int:
        """Distinguishes the last message received, including the length of its tensors, from all others."""


@runtime_checkable
class BoundedChannel(Channel, Protocol):
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
class AdoptingTransport(Protocol):
    """Optional method of a `Transport` whose channels implement `MovableChannel`."""

    def adopt(self, descriptor: int, received: bytes, peer: str, options: ListenOptions) -> Channel:
        """Take over a connection from `MovableChannel.detach`, in any process.

        Args:
            descriptor: Its file descriptor, which the channel then owns.
            received: Bytes that were already read from it.
            peer: Address of the other end.
            options: As for `Transport.listen`.
        """


class Transport(Protocol):
    """One way to reach an executor."""

    name: str
    """Name in the configuration."""
    scheme: str
    """Scheme of its addresses, for example ``tcp`` in ``tcp://host:port``."""

    def connect(self, address: str, options: ConnectOptions) -> Connection:
        """Connect and greet.

        Raises:
            TransportError: There is no answer at that address.
            RefusedError, ProtocolVersionError: The server refuses.
            ConfigurationError: The address is invalid.

        Laws:
            transport.error_names_address, transport.address_checked
        """

    def listen(self, address: str, options: ListenOptions) -> Listener:
        """Listen on an address.

        Raises:
            TransportError: The address cannot be bound.
            ConfigurationError: The address is invalid, or this transport has no listening side.
        """


class PeerConnection(Protocol):
    """The sending end of a courier's connection, which carries values from session to session.

    Concurrency:
        One thread at a time; any thread may call `close`.
    """

    def send(self, parcel: Parcel, tensors: Sequence[torch.Tensor]) -> None:
        """Send a parcel with its tensor, if it has one.

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
class PeerTransport(Transport, Protocol):
    """Optional method of a `Transport` that carries values from server to server."""

    def carry(self, address: str, courier: PeerHello, options: ConnectOptions) -> PeerConnection:
        """Connect to another server and greet it as a courier.

        Raises:
            TransportError: There is no answer at that address.
            RefusedError, ProtocolVersionError: The server refuses.
            ConfigurationError: The address is invalid.

        Laws:
            transport.parcels
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
class PeerRelayingTransport(Protocol):
    """Optional method of a `PeerTransport` whose carriers implement `MovablePeerConnection`."""

    def carry_on(self, descriptor: int, received: bytes, address: str, options: ConnectOptions) -> PeerConnection:
        """Send on a connection from `MovablePeerConnection.detach`, in any process.

        Args:
            descriptor: Its file descriptor, which the carrier then owns.
            received: Bytes that were already read from it.
            address: The address that it leads to.
            options: As for `PeerTransport.carry`.
        """
