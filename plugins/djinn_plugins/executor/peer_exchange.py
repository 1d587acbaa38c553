"""The post: how a session exchanges values with other sessions.

A session sends through *carriers*, one per peer, which a transport opens. Incoming values wait in its mailbox.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch

from djinn.errors import DjinnError, PeerError, ProtocolError, ProtocolVersionError, RefusedError, TransportError
from djinn.wire.messages import PROTOCOL_VERSION, Hello, PeerHello, ValueTransfer, Welcome
from djinn.wire.tensors import copied
from djinn_plugins.common.kinds.transport import Channel, PeerConnection
from djinn_plugins.executor.mailbox import Delivery, InboxRegistry, Mailbox
from djinn_plugins.executor.transfers import check

MAX_PEERS = 1024
"""Most peers of one session."""
DRAIN_S = 5.0
"""How long pending sends may take after a session has ended."""
_RELAY = "Bring the value home and upload it there, or correct the address."


class Post(Protocol):
    """Lets a session exchange values with others.

    Concurrency:
        One thread at a time.
    """

    session: str
    """Name of the session."""

    def connect(self, peer: int, address: str, mailbox: bytes) -> None:
        """Connect to another session; the number refers to it after this call.

        Raises:
            PeerError: It cannot be reached; the error names the address.
        """

    def send(self, peer: int, transfer: ValueTransfer, tensors: Sequence[torch.Tensor]) -> None:
        """Send a transfer to a peer.

        Raises:
            PeerError: There is no such peer, or it is gone.

        Ownership:
            The tensors may change once this returns.
        """

    def receive(self, sender: str, number: int) -> tuple[ValueTransfer, Sequence[torch.Tensor]]:
        """Wait for a transfer.

        Raises:
            PeerError: The transfer will not arrive.
        """

    def peek(self, sender: str, number: int) -> tuple[ValueTransfer, Sequence[torch.Tensor], bool] | None:
        """Look at a transfer, also one that was sent ahead; see `djinn_plugins.executor.mailbox.Mailbox.peek`."""


@attrs.frozen
class _Peer:
    address: str
    mailbox: bytes
    carrier: PeerConnection


class PeerExchange:
    """The `Post` of a session with a mailbox.

    Args:
        session: Name of the session.
        mailbox: Where other sessions deliver.
        open_carrier: Opens a carrier to a mailbox at an address.
        is_gone: Whether the session's client has left, so that waiting is pointless.

    Concurrency:
        One thread at a time; any thread may call `close`.
    """

    def __init__(
        self, session: str, mailbox: Mailbox, open_carrier: Callable[[str, PeerHello], PeerConnection],
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.session = session
        self._mailbox = mailbox
        self._open_carrier = open_carrier
        self._is_gone = is_gone
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._closed = False

    def connect(self, peer: int, address: str, mailbox: bytes) -> None:
        """Connect to another session under a number, replacing an earlier peer of that number; see `Post.connect`."""
        known = self._peers.get(peer)
        if known is not None and (known.address, known.mailbox) == (address, mailbox):
            return
        if known is not None:
            self._drop(peer, DRAIN_S)
        if len(self._peers) >= MAX_PEERS:
            raise PeerError(f"{address} is one peer too many: a session has {MAX_PEERS} at most.")
        hello = PeerHello(PROTOCOL_VERSION, sys.byteorder, mailbox, self.session)
        try:
            with self._mailbox.waiting():
                carrier = self._open_carrier(address, hello)
        except PeerError:
            raise
        except DjinnError as error:
            raise PeerError(f"{address} cannot be reached from here: {error.summary}",
                            hint=error.hint if isinstance(error, RefusedError) else _RELAY) from None
        with self._lock:
            if not self._closed:
                self._peers[peer] = _Peer(address, mailbox, carrier)
                return
        carrier.close()
        raise PeerError("The session has ended.")

    def send(self, peer: int, transfer: ValueTransfer, tensors: Sequence[torch.Tensor]) -> None:
        """Send a transfer to a peer; see `Post.send`."""
        known = self._peers.get(peer)
        if known is None:
            raise PeerError(f"Peer {peer} is not connected, so transfer {transfer.transfer} was not sent.", hint=_RELAY)
        try:
            with self._mailbox.waiting():
                known.carrier.send(transfer, tensors)
        except (TransportError, ProtocolError) as error:
            self._drop(peer)
            raise PeerError(f"ValueTransfer {transfer.transfer} could not be sent to {known.address}: {error.summary}",
                            hint=_RELAY) from None
        except BaseException:
            self._drop(peer)
            raise

    def receive(self, sender: str, number: int) -> tuple[ValueTransfer, Sequence[torch.Tensor]]:
        """Wait for a transfer; see `Post.receive`."""
        return self._mailbox.take(sender, number, self._is_gone)

    def peek(self, sender: str, number: int) -> tuple[ValueTransfer, Sequence[torch.Tensor], bool] | None:
        """Look at a transfer; see `Post.peek`."""
        return self._mailbox.peek(sender, number)

    def close(self, drain_s: float = 0.0) -> None:
        """Close the connections to all peers. Never raises; may be called twice or from another thread.

        Args:
            drain_s: How long pending sends may take.
        """
        with self._lock:
            self._closed = True
            peers, self._peers = self._peers, {}
        for known in peers.values():
            known.carrier.close(drain_s)

    def _drop(self, peer: int, drain_s: float = 0.0) -> None:
        with self._lock:
            known = self._peers.pop(peer, None)
        if known is not None:
            known.carrier.close(drain_s)


class LocalPeer:
    """Delivers transfers to a mailbox in this process."""

    def __init__(self, mailbox: Mailbox, sender: str, is_gone: Callable[[], bool] = lambda: False) -> None:
        self._mailbox = mailbox
        self._is_gone = is_gone
        self._delivery = mailbox.begin(sender)

    def send(self, transfer: ValueTransfer, tensors: Sequence[torch.Tensor]) -> None:
        """Put copies into the mailbox; see `djinn_plugins.common.kinds.transport.PeerConnection.send`."""
        check(transfer)
        with torch.inference_mode(False), torch.no_grad():
            self._mailbox.put(self._delivery, transfer, [copied(tensor) for tensor in tensors], self._is_gone)

    def close(self, drain_s: float = 0.0) -> None:
        """Stop sending; see `djinn_plugins.common.kinds.transport.PeerConnection.close`."""
        self._mailbox.end(self._delivery, "it has ended")


def check_versions(hello: Hello | PeerHello) -> None:
    """Check that a client, or a peer, is compatible with this server.

    Raises:
        ProtocolVersionError, RefusedError: They are incompatible.
    """
    who = "client" if isinstance(hello, Hello) else "peer"
    if hello.protocol != PROTOCOL_VERSION:
        raise ProtocolVersionError(f"The {who} speaks protocol {hello.protocol}, this server {PROTOCOL_VERSION}.",
                                   hint="Install the same djinn release on both.")
    if hello.byte_order != sys.byteorder:
        raise RefusedError(f"The {who} is a {hello.byte_order[:20]!r} endian machine, this server a "
                           f"{sys.byteorder!r} endian one, and tensors travel as they lie in memory.",
                           hint="Use machines of the same byte order.")


def no_mailbox() -> RefusedError:
    """Make the error for an unknown mailbox, so that every caller words it the same."""
    return RefusedError("There is no session here that the peer could deliver to.",
                        hint="The session may have ended; start it again.")


def deliver(channel: Channel, sequence: int, peer: PeerHello, room: InboxRegistry, welcome: Welcome) -> None:
    """Receive a peer's transfers until the peer or the receiving session ends.

    Args:
        channel: Its connection.
        sequence: Frame number of its greeting.
        peer: Its greeting.
        room: The mailboxes of this process.
        welcome: The answer to send.

    Raises:
        ProtocolVersionError, RefusedError: The peer is incompatible or names no known mailbox.
        ProtocolError: It sent something other than a transfer.
        TransportError: The connection broke.
    """
    check_versions(peer)
    mailbox = room.find(peer.mailbox)
    if mailbox is None:
        raise no_mailbox()
    delivery = mailbox.begin(peer.session, channel.close)
    reason = "its connection ended"
    try:
        channel.send(sequence, welcome)
        channel.greeted()
        while _take_in(channel, mailbox, delivery):
            pass
    except DjinnError as error:
        reason = error.summary.rstrip(".")
        raise
    finally:
        mailbox.end(delivery, reason)


def _take_in(channel: Channel, mailbox: Mailbox, delivery: Delivery) -> bool:
    """Receive one transfer. Its tensors are released on return, not held while waiting for the next one."""
    received = channel.receive()
    if received is None:
        return False
    _, transfer, tensors = received
    if not isinstance(transfer, ValueTransfer):
        raise ProtocolError(f"A {type(transfer).__name__} where a transfer was expected.")
    check(transfer)
    mailbox.put(delivery, transfer, tensors)
    return True
