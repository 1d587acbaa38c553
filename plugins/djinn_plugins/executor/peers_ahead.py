"""Values that go from session to session ahead of requests, as `djinn_plugins.executor.early_answers` to clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from djinn.errors import DjinnError
from djinn.wire.messages import Poisoned, Receive, Run, Send, TensorHeader, ValueTransfer
from djinn_plugins.common.memory.tensor_bytes import size_bytes
from djinn_plugins.common.wire.assumptions import MAX_ASSUMED, AheadNote, Assumed, merged, note_of, noted
from djinn_plugins.executor import transfers
from djinn_plugins.executor.mailbox import MAX_AHEAD_BYTES, TRANSFER_BYTES
from djinn_plugins.executor.peer_exchange import Post
from djinn_plugins.executor.speculation import RunAhead

__all__ = ("PeersAhead",)

MAX_VALUE_BYTES = 2**20
"""Largest value that is sent ahead, or received."""


class PeersAhead:
    """The exchanges of one session that its client has not requested; a `djinn_plugins.executor.speculation.Abroad`.

    Args:
        post: Carries values.
        unpack: Makes the value of a transfer.
        read: Copies a tensor to the host; the result may share the tensor's memory.

    Attributes:
        epoch: How often values were withdrawn.
        sent: Values that were sent ahead.

    Concurrency:
        One thread at a time.

    Laws:
        session.pushed_is_asked
    """

    def __init__(self, post: Post, unpack: Callable[[ValueTransfer, torch.Tensor | None], Any],
                 read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._post = post
        self._unpack = unpack
        self._read = read
        self._sent: dict[tuple[int, int], int] = {}
        """Bytes of the values that were sent ahead and not requested, by peer and number."""
        self.epoch = 0
        self.sent = 0

    @property
    def session(self) -> str:
        """Name of the session."""
        return self._post.session

    def look(self, command: Receive) -> RunAhead | None:
        """Return a value that another session has sent ahead; ``None`` if there is none yet, or it is void."""
        found = self._post.peek(command.sender, command.transfer)
        if found is None:
            return None
        transfer, tensors, is_requested = found
        item, note = transfer.item, note_of(transfer)
        if transfer.told or transfer.failure or transfer.members or item is None:
            return None
        if isinstance(item, TensorHeader) and size_bytes(item) > MAX_VALUE_BYTES:
            return None
        assumed = () if note is None or is_requested else note.assumes
        if any(one.session == self.session and one.epoch != self.epoch for one in assumed):
            # It was computed from a value that this session has withdrawn.
            return None
        try:
            value = self._unpack(transfer, tensors[0] if tensors else None)
        except Exception:  # noqa: BLE001  # the request will fail again, and report it
            return None
        return RunAhead(Run(0, (), [], ()), [value], exchange=command, arrived=item,
                        assumes=tuple([one for one in assumed if one.session != self.session]))

    def is_valid(self, ahead: RunAhead) -> bool:
        """Whether a value that was received ahead is not void yet."""
        if ahead.arrived is None or not isinstance(ahead.exchange, Receive):
            return True
        found = self._post.peek(ahead.exchange.sender, ahead.exchange.transfer)
        return found is not None and found[0].item is ahead.arrived

    def can_send(self, values: Sequence[Any]) -> bool:
        """Whether values may be sent ahead."""
        sizes = [value.nbytes if isinstance(value, torch.Tensor) else 0 for value in values]
        waiting_bytes = sum(self._sent.values()) + sum(sizes) + TRANSFER_BYTES * len(sizes)
        return max(sizes, default=0) <= MAX_VALUE_BYTES and waiting_bytes <= MAX_AHEAD_BYTES // 2 and not any(
            isinstance(value, (Poisoned, list, tuple, dict)) for value in values)

    def send(self, command: Send, value: Any, assumed: Sequence[Assumed]) -> None:
        """Send a value ahead. If that fails, it is sent when it is requested."""
        every = merged(assumed)
        if len(every) > MAX_ASSUMED:
            return
        try:
            transfer, tensors = transfers.pack(command.transfer, value, self._read)
            self._post.send(command.peer, noted(transfer, AheadNote("value", every)), tensors)
        except DjinnError:
            return
        self.sent += 1
        self._sent[command.peer, command.transfer] = TRANSFER_BYTES + sum(tensor.nbytes for tensor in tensors)

    def is_sent(self, command: Send) -> bool:
        """Whether the value of a requested command was sent ahead, and is not void; it then counts as requested."""
        return self._sent.pop((command.peer, command.transfer), None) is not None

    def withdraw(self) -> None:
        """Make the values void that were sent to other sessions ahead."""
        if not self._sent:
            return
        self.epoch += 1
        last = dict(list(self._sent))
        self._sent.clear()
        for peer, number in last.items():
            try:
                self._post.send(peer, noted(ValueTransfer(number), AheadNote("void")), ())
            except DjinnError:
                # It is gone; the next request says so.
                continue
