"""How values are sent to other sessions, and received from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from djinn.errors import PeerError, ProtocolError
from djinn.wire import messages
from djinn.wire.messages import GENERATOR_HANDLE, Failure, Peer, Plain, Poisoned, Receive, Send, ValueTransfer
from djinn_plugins.common.kinds.executor import RandomState
from djinn_plugins.common.kinds.memory import SessionMemory
from djinn_plugins.common.wire.assumptions import AheadNote, noted
from djinn_plugins.executor import transfers
from djinn_plugins.executor.peer_exchange import Post
from djinn_plugins.executor.peers_ahead import PeersAhead
from djinn_plugins.executor.reports import Failures
from djinn_plugins.executor.session_values import SessionValues
from djinn_plugins.executor.speculation import Speculator

__all__ = ("PeerValues",)

MAX_TOLD = 16
"""Most failures sent along with a transfer."""


class PeerValues:
    """The values that a session exchanges with other sessions.

    Args:
        post: Carries them; ``None`` if the session exchanges none.
        values: The session's values.
        memory: The memory of the values.
        random: The session's random numbers, which can be sent and received like a value.
        failures: Records failures, also those that arrive with values.
        ahead: What has run ahead.

    Attributes:
        abroad: How values are exchanged before that is requested; ``None`` if they are not.

    Concurrency:
        One thread at a time. It holds the memory's lock while it handles values, but not while it waits for others.
    """

    def __init__(self, post: Post | None, values: SessionValues, memory: SessionMemory, random: RandomState,
                 failures: Failures, ahead: Speculator) -> None:
        self._post = post
        self._ahead = ahead
        self.abroad: PeersAhead | None = None
        self._values = values
        self._memory = memory
        self._random = random
        self._failures = failures

    def connect(self, command: Peer) -> None:
        """Connect to another session. What was sent ahead to another one of that number is void."""
        with self._memory.lock:
            self._ahead.drop()
            self._memory.release()
        self._failures.attempt(lambda: self._carrier().connect(command.peer, command.address, command.mailbox))

    def send(self, command: Send) -> None:
        """Send a value, or the failure that stands for it, unless it was sent ahead."""
        with self._memory.lock:
            is_sent = self._ahead.exchanged(command) is not None and (
                self.abroad is not None and self.abroad.is_sent(command))
            self._memory.release()
        self._failures.attempt(lambda: self._confirmed(command) if is_sent else self._sent(command))

    def receive(self, command: Receive) -> None:
        """Wait for a value, and add it."""
        with self._memory.lock:
            ahead = self._ahead.exchanged(command)
            self._memory.release()
        arrived = self._failures.attempt(lambda: self._carrier().receive(command.sender, command.transfer))
        with self._memory.lock:
            if isinstance(arrived, Poisoned):
                self._ahead.drop()
                values: list[Any] | Poisoned = arrived
            elif ahead is not None and arrived[0].item is ahead.arrived:
                for failure in arrived[0].told:
                    self._failures.adopt(failure)
                values = ahead.outputs
            else:
                self._ahead.drop()
                values = self._failures.attempt(lambda: self._unpacked(command, *arrived))
            self._add(command, values)
            self._memory.release()

    def begin_ahead(self) -> PeersAhead | None:
        """Begin to exchange values before that is requested; return how, if this session exchanges values."""
        if self._post is not None:
            self.abroad = PeersAhead(self._post, self._unpacked_ahead, self._values.read)
            self._ahead.abroad = self.abroad
        return self.abroad

    def _unpacked_ahead(self, transfer: ValueTransfer, tensor: torch.Tensor | None) -> Any:
        if isinstance(transfer.item, Plain):
            return messages.from_wire(transfer.item.value)
        assert tensor is not None
        return transfers.unpack(transfer, tensor, self._values.adopt)

    def _confirmed(self, command: Send) -> None:
        """Tell the receiver of a value that was sent ahead that it is requested now."""
        post = self._carrier()
        post.send(command.peer, noted(ValueTransfer(command.transfer, told=self._told()), AheadNote("requested")), ())

    def _told(self) -> tuple[Failure, ...]:
        """Return the failures that happened before a value is sent: its receiver also gets them."""
        session = self._carrier().session
        return tuple(self._failures.of_others(failure, session) for failure in self._failures.pending[:MAX_TOLD])

    def _carrier(self) -> Post:
        if self._post is None:
            raise PeerError("This session exchanges no values with others.", hint="Bring the value home instead.")
        return self._post

    def _sent(self, command: Send) -> None:
        post, failures = self._carrier(), self._failures
        with self._memory.lock:
            packed = failures.attempt(lambda: self._packed(command, post.session))
            self._memory.release()
        if isinstance(packed, Poisoned):
            packed = ValueTransfer(command.transfer, failure=failures.told_to_others(packed, post.session)), ()
        transfer, tensors = packed
        told = self._told()
        post.send(command.peer, msgspec.structs.replace(transfer, told=told) if told else transfer, tensors)

    def _packed(self, command: Send, session: str) -> tuple[ValueTransfer, Sequence[torch.Tensor]] | Poisoned:
        if command.handle == GENERATOR_HANDLE:
            return transfers.pack(command.transfer, self._random.get(), lambda state: state)
        self._memory.use((command.handle, *command.family))
        value = self._values.value(command.handle)
        if not command.family or not isinstance(value, torch.Tensor):
            return value if isinstance(value, Poisoned) else transfers.pack(command.transfer, value, self._values.read)
        family = map(self._values.value, command.family)
        return transfers.pack_family(command.transfer, [
            self._failures.told_to_others(member, session) if isinstance(member, Poisoned) else member
            for member in family], self._values.read)

    def _unpacked(
        self, command: Receive, transfer: ValueTransfer, tensors: Sequence[torch.Tensor]
    ) -> list[Any] | Poisoned:
        for failure in transfer.told:
            self._failures.adopt(failure)
        if transfer.failure is not None:
            return self._failures.adopt(transfer.failure)
        if isinstance(transfer.item, Plain):
            return [messages.from_wire(transfer.item.value)]
        if command.handle == GENERATOR_HANDLE:
            return [tensors[0]]
        if transfer.members:
            return [self._failures.adopt(made) if isinstance(made, Failure) else made
                    for made in transfers.unpack_family(transfer, tensors[0], self._values.adopt)]
        return [transfers.unpack(transfer, tensors[0], self._values.adopt)]

    def _add(self, command: Receive, values: list[Any] | Poisoned) -> None:
        handles = command.family or (command.handle,)
        if isinstance(values, Poisoned) or len(values) != len(handles):
            poison = values if isinstance(values, Poisoned) else self._failures.add(
                ProtocolError(f"A transfer of {len(values)} values where {len(handles)} were expected."))
            values = [poison] * len(handles)
        if command.handle == GENERATOR_HANDLE:
            if not isinstance(values[0], Poisoned):
                state = values[0]
                self._failures.attempt(lambda: self._random.set(state))
        elif self._values.admits(handles):
            for handle, value in zip(handles, values, strict=True):
                self._memory.values.put(handle, value)
