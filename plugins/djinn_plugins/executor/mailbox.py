"""Mailboxes: buffers for values that other sessions send.

Every sender that knows a mailbox's key may deliver into it. Backpressure: while too much from one sender is unclaimed,
the mailbox does not take in its next value. The limit is lifted while the receiver itself is waiting; otherwise two
sessions that send to each other could deadlock.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

import attrs
import msgspec
import torch

from djinn.errors import PeerError, ProtocolError
from djinn.wire.messages import MAILBOX_BYTES, Plain, TensorHeader, ValueTransfer
from djinn_plugins.common.wire.assumptions import AheadNote, note_of

MAX_UNCLAIMED_BYTES = 256 * 2**20
"""Bytes from one sender that may be unclaimed before the mailbox takes in no more."""
MAX_HELD_BYTES = 16 * 2**30
"""Bytes from one sender that may be unclaimed while the receiver itself is waiting."""
MAX_SENDERS = 1024
"""Most senders connected at a time, and most ended senders remembered."""
ABSENCE_S = 120.0
"""How long a receiver waits for a sender that has never connected."""
MAX_AHEAD_BYTES = 8 * 2**20
"""Bytes of values from one sender that were sent ahead and not requested yet. A sender never exceeds it."""
TRANSFER_BYTES = 1024
"""Bytes that a transfer counts in addition to its content."""
CONTAINER_BYTES = 64
"""What a byte of a message may take in memory: an empty list, for instance."""
TICK_S = 0.25
"""How often a waiting thread checks whether its result is still needed."""
_AGAIN = "Send the value another way, or start the session again; see the other server's log for the reason."


@attrs.define(eq=False)
class Delivery:
    """One connection, or session of this process, that delivers into a mailbox.

    Attributes:
        sender: Name of the sending session.
        close: Ends the connection; called from another thread.
        held_bytes: Bytes it has delivered that are still unclaimed.
        ahead_bytes: Bytes it has delivered ahead, which were not requested there yet.
    """

    sender: str
    close: Callable[[], None]
    held_bytes: int = 0
    ahead_bytes: int = 0


@attrs.frozen
class _Held:
    delivery: Delivery
    transfer: ValueTransfer
    tensors: Sequence[torch.Tensor]
    size_bytes: int


class Mailbox:
    """The values waiting for one session.

    Attributes:
        key: Secret that authorizes a sender to deliver.

    Concurrency:
        Any thread.
    """

    def __init__(
        self, *, max_unclaimed_bytes: int = MAX_UNCLAIMED_BYTES, max_held_bytes: int = MAX_HELD_BYTES,
        absence_s: float = ABSENCE_S, prefix: bytes = b"",
    ) -> None:
        self.key = prefix + secrets.token_bytes(MAILBOX_BYTES - len(prefix))
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self._max_held_bytes = max_held_bytes
        self._absence_s = absence_s
        self._changed = threading.Condition()
        self._held: dict[tuple[str, int], _Held] = {}
        self._ahead: dict[tuple[str, int], _Held] = {}
        """Values that were sent ahead, and not requested there yet."""
        self._bell: tuple[int, int] | None = None
        """The ends of a pipe that has a byte when something was sent ahead since."""
        self._deliveries: dict[Delivery, None] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._waiting = 0
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of all waiting values."""
        with self._changed:
            return sum(held.size_bytes for held in (*self._held.values(), *self._ahead.values()))

    def begin(self, sender: str, close: Callable[[], None] = lambda: None) -> Delivery:
        """Register a sender.

        Raises:
            PeerError: The session has ended, or there are too many senders.
        """
        made = Delivery(sender, close)
        with self._changed:
            if self._closed:
                raise _closed()
            if len(self._deliveries) >= MAX_SENDERS:
                raise PeerError(f"{MAX_SENDERS} others deliver to this session already.")
            self._deliveries[made] = None
            self._ended.pop(sender, None)
        return made

    def end(self, delivery: Delivery, reason: str) -> None:
        """Mark a sender as finished; keep the values it has already delivered."""
        with self._changed:
            if delivery not in self._deliveries:
                return
            del self._deliveries[delivery]
            if not self._is_connected(delivery.sender):
                self._void(delivery)
                self._ended[delivery.sender] = reason
                while len(self._ended) > MAX_SENDERS:
                    self._ended.popitem(last=False)
            self._changed.notify_all()

    def put(
        self, delivery: Delivery, transfer: ValueTransfer, tensors: Sequence[torch.Tensor],
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take in a transfer, then wait until there is room for the next one or the sender is gone.

        Raises:
            ProtocolError: A transfer with that number is waiting already, or too much is waiting.
            PeerError: The session has ended.

        Ownership:
            The tensors belong to the receiver after this call.
        """
        note = note_of(transfer)
        length = TRANSFER_BYTES + sum(tensor.nbytes for tensor in tensors) + _described_bytes(transfer)
        with self._changed:
            if self._closed:
                raise _closed()
            key = delivery.sender, transfer.transfer
            if note is not None:
                self._noted(delivery, note, _Held(delivery, transfer, tensors, length))
                self._changed.notify_all()
                return
            self._forget_ahead(key)
            if key in self._held:
                raise ProtocolError(f"ValueTransfer {transfer.transfer} came twice.")
            if delivery.held_bytes + length > self._max_held_bytes:
                raise ProtocolError(f"More than {self._max_held_bytes} bytes of one sender wait for their receiver.")
            self._held[key] = _Held(delivery, transfer, tensors, length)
            delivery.held_bytes += length
            self._changed.notify_all()
            while self._holds_up(delivery) and not is_gone():
                self._changed.wait(TICK_S)

    def take(
        self, sender: str, number: int, is_gone: Callable[[], bool] = lambda: False
    ) -> tuple[ValueTransfer, Sequence[torch.Tensor]]:
        """Wait for a transfer and remove it from the mailbox.

        Args:
            sender: Name of the sending session.
            number: Number of the transfer.
            is_gone: Whether the receiver no longer needs it.

        Raises:
            PeerError: The transfer will not arrive, because the sender is gone or never connected; or the receiver no
                longer needs it.
        """
        patience = monotonic() + self._absence_s
        with self.waiting(), self._changed:
            while (held := self._held.pop((sender, number), None)) is None:
                self._check(sender, number, patience)
                if is_gone():
                    raise PeerError(f"Transfer {number} of session {sender} is not waited for: the client has left.")
                self._changed.wait(TICK_S)
            held.delivery.held_bytes -= held.size_bytes
            self._changed.notify_all()
        return held.transfer, held.tensors

    def _noted(self, delivery: Delivery, note: AheadNote, held: _Held) -> None:
        """Process a value that was sent ahead, or what became of such values."""
        key = delivery.sender, held.transfer.transfer
        if note.stage == "void":
            self._void(delivery)
            return
        if note.stage == "value":
            self._forget_ahead(key)
            if delivery.ahead_bytes + held.size_bytes > MAX_AHEAD_BYTES:
                raise ProtocolError(f"More than {MAX_AHEAD_BYTES} bytes were sent ahead.")
            delivery.ahead_bytes += held.size_bytes
            self._ahead[key] = held
            self._ring()
            return
        ahead = self._ahead.get(key)
        if ahead is None or key in self._held:
            raise ProtocolError(f"ValueTransfer {held.transfer.transfer} was not sent ahead.")
        self._forget_ahead(key)
        transfer = msgspec.structs.replace(ahead.transfer, told=held.transfer.told)
        self._held[key] = attrs.evolve(ahead, transfer=transfer)
        delivery.held_bytes += ahead.size_bytes

    def _forget_ahead(self, key: tuple[str, int]) -> None:
        ahead = self._ahead.pop(key, None)
        if ahead is not None:
            ahead.delivery.ahead_bytes -= ahead.size_bytes

    def _void(self, delivery: Delivery) -> None:
        for key in [key for key, held in self._ahead.items() if held.delivery is delivery]:
            self._forget_ahead(key)

    def peek(self, sender: str, number: int) -> tuple[ValueTransfer, Sequence[torch.Tensor], bool] | None:
        """Look at a transfer that is here, and leave it.

        Returns:
            The transfer, its tensors, and whether it was requested there; ``None`` if it is not here.
        """
        key = sender, number
        with self._changed:
            requested = self._held.get(key)
            held = requested or self._ahead.get(key)
        return None if held is None else (held.transfer, held.tensors, requested is not None)

    def bell(self) -> int:
        """Return a descriptor that is readable when something was sent ahead since the last call of `hush`.

        Returns:
            -1 if the mailbox is closed. The descriptor is closed with it.
        """
        with self._changed:
            if self._closed:
                return -1
            if self._bell is None:
                self._bell = os.pipe()
                for end in self._bell:
                    os.set_blocking(end, False)
            return self._bell[0]

    def hush(self) -> None:
        """Make the descriptor unreadable until something else is sent ahead."""
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell[0], 64)

    def _ring(self) -> None:
        if self._bell is not None:
            # A full pipe rings already.
            with contextlib.suppress(BlockingIOError):
                os.write(self._bell[1], b"\0")

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Lift the limit for senders while the receiver waits for another session."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def close(self) -> None:
        """Drop all values, wake all waiting threads and close the senders' connections. May be called twice."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._ahead.clear()
            bell, self._bell = self._bell, None
            for end in bell or ():
                os.close(end)
            deliveries = list(self._deliveries)
            self._changed.notify_all()
        for delivery in deliveries:
            delivery.close()

    def _check(self, sender: str, number: int, patience: float) -> None:
        if self._closed:
            raise _closed()
        if self._is_connected(sender):
            return
        if sender in self._ended:
            raise PeerError(f"Session {sender} is gone and has not sent transfer {number}: {self._ended[sender]}.",
                            hint=_AGAIN)
        if monotonic() >= patience:
            raise PeerError(f"Session {sender} should have sent transfer {number} and has not connected within "
                            f"{self._absence_s:g} s.", hint=_AGAIN)

    def _holds_up(self, delivery: Delivery) -> bool:
        return (delivery.held_bytes > self._max_unclaimed_bytes and not self._waiting and not self._closed
                and delivery in self._deliveries)

    def _is_connected(self, sender: str) -> bool:
        return any(delivery.sender == sender for delivery in self._deliveries)


def _described_bytes(transfer: ValueTransfer) -> int:
    """Return how much memory a transfer may take without its tensors."""
    item = transfer.item
    if transfer.told or transfer.members or (isinstance(item, Plain) and isinstance(item.value, (list, dict))):
        return CONTAINER_BYTES * len(msgspec.msgpack.encode(transfer))
    return 0 if isinstance(item, TensorHeader) else len(msgspec.msgpack.encode(transfer))


class InboxRegistry:
    """The mailboxes of all sessions of one process.

    Args:
        prefix: Common beginning of their keys, so that a key identifies the process.

    Concurrency:
        Any thread.
    """

    def __init__(self, prefix: bytes = b"") -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._mailboxes: dict[Mailbox, None] = {}

    def open(self) -> Mailbox:
        """Create a mailbox for a session."""
        made = Mailbox(prefix=self._prefix)
        with self._lock:
            self._mailboxes[made] = None
        return made

    def find(self, key: bytes) -> Mailbox | None:
        """Look up a mailbox. The time this takes reveals nothing about the keys."""
        with self._lock:
            mailboxes = list(self._mailboxes)
        found = None
        for mailbox in mailboxes:
            if hmac.compare_digest(mailbox.key, key):
                found = mailbox
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes waiting in all mailboxes."""
        with self._lock:
            mailboxes = list(self._mailboxes)
        return sum(mailbox.held_bytes for mailbox in mailboxes)

    def remove(self, mailbox: Mailbox) -> None:
        """Close the mailbox of an ended session."""
        with self._lock:
            self._mailboxes.pop(mailbox, None)
        mailbox.close()

    def close(self) -> None:
        """Close all mailboxes."""
        with self._lock:
            mailboxes = list(self._mailboxes)
        for mailbox in mailboxes:
            self.remove(mailbox)


def _closed() -> PeerError:
    return PeerError("The session that the value was for has ended.")
