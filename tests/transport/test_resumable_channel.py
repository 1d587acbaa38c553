"""A session's channel, which outlives its connections."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from djinn.wire.messages import Goodbye, Message, Result
from djinn_plugins.transport.resumable_channel import ResumableChannel


class Noted:
    """A connection that notes what is sent on it."""

    peer = "a client"

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, sequence: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.sent.append(message)

    def receive(self) -> None:
        return

    def close(self) -> None:
        pass

    def greeted(self) -> None:
        pass


def test_the_reason_for_which_a_session_ends_is_the_last_that_its_client_hears() -> None:
    connection, reason = Noted(), Goodbye("DJ318", "The token was revoked.", "")
    channel = ResumableChannel(connection, 1, 30.0)
    channel.close(reason)
    channel.send(1, Result())
    assert connection.sent == [reason]
