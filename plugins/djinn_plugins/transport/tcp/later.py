"""The client's side of values that it does not wait for, for one session."""

from __future__ import annotations

from collections import deque

import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Batch, Result
from djinn_plugins.common.kinds.transport import LaterReply
from djinn_plugins.transport.tcp.answers import check_form

__all__ = ("LaterReplies",)


class LaterReplies:
    """Values that the server sends while the client continues; see `djinn.wire.messages.Batch.later`.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._asked: deque[tuple[int, tuple[int, ...]]] = deque()
        """Numbers of batches that asked for such values, which have not arrived; and the handles."""
        self._last = 0
        self._arrived: list[LaterReply] = []

    @property
    def is_waiting(self) -> bool:
        """Whether values were asked for that have not arrived."""
        return bool(self._asked)

    def sent(self, number: int, batch: Batch) -> None:
        """Note a batch that is about to be sent."""
        if batch.later:
            self._asked.append((number, batch.later))
            self._last = number

    def arrived(self, number: int, result: Result, tensors: list[torch.Tensor]) -> None:
        """Take in the values of a batch, or ignore them if they count as lost.

        Raises:
            ProtocolError: They are not the values that were asked for.
        """
        if number > self._last:
            raise ProtocolError(f"It sent values for batch {number}, which asked for none.")
        self.lost(number - 1)
        if self._asked and self._asked[0][0] == number:
            _, handles = self._asked.popleft()
            if len(result.items) != len(handles) or any(
                    (result.failures, result.timings, result.warnings, result.run_ns, result.assumes)):
                raise ProtocolError(f"It sent something else than the {len(handles)} values that batch {number} "
                                    "asked for.")
            check_form(Batch(fetch=handles), result, len(tensors))
            self._arrived.append((handles, result, tensors))

    def lost(self, received: int) -> None:
        """Note that the values of all batches up to a number will not arrive any more."""
        while self._asked and self._asked[0][0] <= received:
            self._arrived.append((self._asked.popleft()[1], None, []))

    def take(self) -> list[LaterReply]:
        """Return the replies that have arrived, or were lost, since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived
