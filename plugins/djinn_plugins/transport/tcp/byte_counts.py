"""How far the transfers of a session are, over all the connections that it has used."""

from __future__ import annotations

from djinn_plugins.transport.tcp.early import EarlyReplies
from djinn_plugins.transport.tcp.outbox import Outbox
from djinn_plugins.transport.tcp.stream import FrameStream

__all__ = ("ByteCounts",)


class ByteCounts:
    """Counts bytes; see `djinn_plugins.common.kinds.transport.SupportsProgress`. Other threads may read the counts.

    Args:
        frames: The current connection.
        outbox: Sends over it.
    """

    def __init__(self, frames: FrameStream, outbox: Outbox) -> None:
        self._frames = frames
        self._outbox = outbox
        self._past_bytes = (0, 0)
        self._left: FrameStream | None = None
        self._early = EarlyReplies()

    @property
    def answered_early(self) -> int:
        """Requests that the server answered before it received them."""
        return self._early.used

    @property
    def round_trips(self) -> int:
        """How many answers were awaited beside requests: fewer than none, since some requests need not wait."""
        return -self._early.used

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far, greeting included."""
        return self._past_bytes[0] + (0 if self._left is self._frames else self._frames.stream.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """Bytes received so far, greeting included."""
        return self._past_bytes[1] + (0 if self._left is self._frames else self._frames.stream.bytes_received)

    @property
    def sending_bytes(self) -> int:
        """Value of `bytes_sent` when everything that was handed over has been sent."""
        return self._past_bytes[0] + (0 if self._left is self._frames else self._outbox.end_bytes)

    @property
    def receiving_bytes(self) -> int:
        """Value of `bytes_received` when the tensors of the answer that is arriving are complete."""
        return self._past_bytes[1] + (0 if self._left is self._frames else self._frames.frame_end_bytes)
