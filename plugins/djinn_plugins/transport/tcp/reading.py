"""What the client's end of a session reads from its current connection."""

from __future__ import annotations

from time import monotonic

import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Ack, Goodbye, Message, Refusal
from djinn_plugins.transport.tcp.byte_counts import ByteCounts
from djinn_plugins.transport.tcp.later import LaterReplies
from djinn_plugins.transport.tcp.outbox import Outbox
from djinn_plugins.transport.tcp.reasons import goodbye, refused
from djinn_plugins.transport.tcp.stream import FrameStream

__all__ = ("MessageReader",)

LAST_WORDS_S = 0.5
"""How long to look for the server's reason after it has stopped reading."""


class MessageReader(ByteCounts):
    """Reads messages.

    Args:
        address: Address of the server.
        frames: The current connection.
        outbox: Sends over it.
    """

    def __init__(self, address: str, frames: FrameStream, outbox: Outbox) -> None:
        super().__init__(frames, outbox)
        self.address = address
        self._later = LaterReplies()

    def _read(self) -> tuple[int, Message, list[torch.Tensor]]:
        received = self._frames.read()
        if received is None:
            raise EOFError("the server closed it")
        if isinstance(received[1], Refusal):
            raise refused(self.address, received[1])
        if isinstance(received[1], Goodbye):
            raise goodbye(self.address, received[1])
        return received

    def _last_words(self) -> Exception | None:
        """Read the server's reason for closing the connection while this side was sending, if there is one."""
        self._frames.stream.deadline = monotonic() + LAST_WORDS_S
        try:
            received = self._frames.read()
            while received is not None and isinstance(received[1], Ack):
                received = self._frames.read()
        except (OSError, EOFError, ProtocolError):
            # This error is less informative than the original one, which is reported instead.
            return None
        if received is not None and isinstance(received[1], Goodbye):
            return goodbye(self.address, received[1])
        return refused(self.address, received[1]) if received is not None and isinstance(received[1], Refusal) else None
