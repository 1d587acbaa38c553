"""Transports carry batches to an executor and answers back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch

from djinn.kinds.executor import Executor
from djinn.wire.messages import Batch, Courier, Message, Parcel, Result, Welcome

PINNED_NAME = "worker.djinn.invalid"
"""The name in certificates that are pinned. Nobody looks it up: a client trusts that one certificate and no other."""


@attrs.frozen
class ConnectOptions:
    """What a client gives a transport to connect with."""

    token: str = ""
    owner: str = ""
    """Whose uploads the server is to keep; see `djinn.config.Config.owner`. Empty: it is to keep none."""
    connect_timeout_s: float = 10.0
    request_timeout_s: float | None = None
    """How long an answer may stand still; ``None``: as long as the server lives."""
    tls_ca: str = ""
    """File with the certificates of the authorities to trust, where connections are encrypted; empty for the
    system's."""
    tls_cert: str = ""
    """File with this client's certificate, for servers that ask for one."""
    tls_key: str = ""
    """File with its key; empty if the certificate's file has it."""
    tls_pin: str = ""
    """The certificate that the server has to show, as PEM, for `PINNED_NAME`, whatever authorities are trusted; empty
    for any that these vouch for."""
    resume: bool = True
    """Whether a session whose connection breaks goes on over another one, if the server keeps it for as long."""
    resume_timeout_s: float = 30.0
    """How long to try for that."""
    resume_bytes: int = 64 * 2**20
    """How much of what was sent may be kept for that until the server says that it has it."""
    open_executor: Callable[[], Executor] | None = None
    """Opens an executor in this process, for transports that have no other side."""
    is_gone: Callable[[], bool] | None = None
    """Whether nobody wants a `Carrier` any more; asked while a transfer stands still."""


@attrs.frozen
class ListenOptions:
    """What a server gives a transport to listen with."""

    greeting_timeout_s: float = 5.0
    """How long a new connection may take to say who it is."""
    progress_timeout_s: float = 30.0
    """How long a frame that has begun may stand still."""
    max_body_bytes: int = 16 * 2**30
    """Largest body of one frame."""
    tls_cert: str = ""
    """File with the server's certificate, where connections are encrypted."""
    tls_key: str = ""
    """File with its key; empty if the certificate's file has it."""
    tls_client_ca: str = ""
    """File with the certificates of the authorities that have to vouch for clients, or these certificates themselves
    as PEM; empty to ask for none."""


class Connection(Protocol):
    """The client's end of a session.

    Concurrency:
        Used by one thread at a time; the session sees to that.

    Laws:
        transport.batch_order, transport.tensors_exact, transport.one_reply_per_request, transport.ownership,
        transport.sessions_separate, transport.closed_is_final, transport.counters_monotonic
    """

    address: str
    welcome: Welcome
    flush_every: int
    """Pending operations that are worth sending before somebody waits: few where the other side works meanwhile."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far; 0 where nothing travels."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far; 0 where nothing travels."""

    def submit(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
        """Send a batch that wants no answer.

        Args:
            batch: The commands.
            tensors: One dense CPU tensor per upload, in order. They may change once this returns.

        Raises:
            TransportError: The connection is gone; names the address.
        """

    def request(self, batch: Batch, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Send a batch and wait for its answer.

        Returns:
            The answer, and one CPU tensor per `TensorHeader` in it, owned by the caller.

        Raises:
            TransportError: The connection is gone, or nothing came in time; names the address.
        """

    def close(self) -> None:
        """End the session. Never raises, may be called twice."""


@runtime_checkable
class ResumingConnection(Connection, Protocol):
    """What a connection may have beside the methods of `Connection`: its session outlives what it travels on.

    Laws:
        transport.exactly_once, transport.resumed
    """

    @property
    def reconnections(self) -> int:
        """How often the session went on over a new connection."""


@runtime_checkable
class CancellingConnection(Connection, Protocol):
    """What a connection may have beside the methods of `Connection`: what was sent on it can be cancelled.

    Where interrupts are deferred (see `djinn.interrupts`), an interrupt ends the waiting in `submit` and `request`. The
    batch counts as sent then.
    """

    def cancel(self) -> None:
        """Have no program run of what was sent and has not begun, and what runs end after its present step.

        Returns soon, also if what runs goes on for long. All other commands are carried out. What is not computed is a
        failure of the kind `djinn.errors.OperationCancelledError`.
        """


@runtime_checkable
class CertifiedConnection(Protocol):
    """What a connection may have beside the methods of `Connection`, if the server showed who it is."""

    @property
    def certificate_expires_s(self) -> float | None:
        """When the server's certificate ends, in seconds since 1970; ``None`` if it showed none."""


class Channel(Protocol):
    """The server's end of one connection."""

    peer: str

    def receive(self) -> tuple[int, Message, list[torch.Tensor]] | None:
        """Wait for the next message: its sequence number, itself, its tensors; ``None`` at an orderly end.

        Raises:
            ProtocolError: The stream is malformed; nothing more can be read from it.
            TransportError: The connection broke or stood still.
        """

    def send(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message with its tensors."""

    def greeted(self) -> None:
        """The other side has said who it is: lift the limits that hold before that."""

    def close(self) -> None:
        """Close the connection. Never raises, may be called twice or from another thread."""


@runtime_checkable
class MovableChannel(Channel, Protocol):
    """What a channel may have beside the methods of `Channel`: another process can go on with it."""

    def detach(self, sequence: int, message: Message) -> tuple[int, bytes]:
        """Let go of the connection without closing it. The channel is of no more use.

        Args:
            sequence: Number of the one message that was received so far.
            message: That message, which whoever goes on receives again, as it is given here.

        Returns:
            The connection's file descriptor, now the caller's; and bytes that were read from it already.
        """


@runtime_checkable
class CountedChannel(Protocol):
    """What a channel may have beside the methods of `Channel`."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far by this process."""

    @property
    def bytes_received(self) -> int:
        """Bytes received so far by this process."""


@runtime_checkable
class DigestingChannel(Channel, Protocol):
    """What a channel may have beside the methods of `Channel`: it tells a message that comes again from another."""

    @property
    def received_digest(self) -> int:
        """Tells the message that was received last, with the length of its tensors, from all others."""


@runtime_checkable
class BoundedChannel(Channel, Protocol):
    """What a channel may have beside the methods of `Channel`: it asks before it takes in tensors."""

    admit_body: Callable[[int], None] | None
    """Called with the length of a frame's body, in bytes, before any memory is set aside for it. It may wait, or raise
    a `LimitError` to have nothing of it read; then the connection is of no more use."""


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
        """Stop accepting. Never raises, may be called twice or from another thread."""


@runtime_checkable
class AdoptingTransport(Protocol):
    """What a transport may have beside the methods of `Transport`, if its channels are of the kind `MovableChannel`."""

    def adopt(self, descriptor: int, received: bytes, peer: str, options: ListenOptions) -> Channel:
        """Go on with a connection that `MovableChannel.detach` gave, in whichever process.

        Args:
            descriptor: Its file descriptor; the channel's from now on.
            received: Bytes that were read from it already.
            peer: Who is at its other end.
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
            TransportError: Nobody answers there.
            RefusedError, ProtocolVersionError: Somebody does, and says no.
            ConfigurationError: The address makes no sense.

        Laws:
            transport.error_names_address, transport.address_checked
        """

    def listen(self, address: str, options: ListenOptions) -> Listener:
        """Listen on an address.

        Raises:
            TransportError: The address cannot be had.
            ConfigurationError: The address makes no sense, or this transport has no listening side.
        """


class Carrier(Protocol):
    """The sending end of a courier's connection, on which values go from session to session.

    Concurrency:
        One thread at a time; `close` may be called by any.
    """

    def send(self, parcel: Parcel, tensors: Sequence[torch.Tensor]) -> None:
        """Send a parcel with its tensor, if it has one.

        Raises:
            TransportError: The connection is gone.

        Ownership:
            The tensors may change once this returns.
        """

    def close(self, drain_s: float = 0.0) -> None:
        """End the connection. Never raises, may be called twice.

        Args:
            drain_s: How long what is still to be sent may take.
        """


@runtime_checkable
class CarryingTransport(Transport, Protocol):
    """What a transport may have beside the methods of `Transport`: values go from server to server on it."""

    def carry(self, address: str, courier: Courier, options: ConnectOptions) -> Carrier:
        """Connect to another server and greet it as a courier.

        Raises:
            TransportError: Nobody answers there.
            RefusedError, ProtocolVersionError: Somebody does, and says no.
            ConfigurationError: The address makes no sense.

        Laws:
            transport.parcels
        """


@runtime_checkable
class MovableCarrier(Carrier, Protocol):
    """What a carrier may have beside the methods of `Carrier`: another process can send on it instead."""

    def detach(self) -> tuple[int, bytes]:
        """Give the connection away, on which nothing was sent yet but the greeting. The carrier is of no more use.

        Returns:
            The connection's file descriptor, now the caller's; and bytes that were read from it already.

        Raises:
            TransportError: It was closed.
        """


@runtime_checkable
class RelayingTransport(Protocol):
    """What a transport may have beside the methods of `CarryingTransport`, if its carriers are `MovableCarrier`."""

    def carry_on(self, descriptor: int, received: bytes, address: str, options: ConnectOptions) -> Carrier:
        """Send on a connection that `MovableCarrier.detach` gave, in whichever process.

        Args:
            descriptor: Its file descriptor; the carrier's from now on.
            received: Bytes that were read from it already.
            address: Where it leads.
            options: As for `CarryingTransport.carry`.
        """
