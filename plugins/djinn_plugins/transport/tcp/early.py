"""The client's side of early answers, for one session."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from djinn.errors import ProtocolError
from djinn.wire.messages import Batch, Result
from djinn_plugins.client.early_inbox import EarlyInbox
from djinn_plugins.common.wire.frames import head_bytes
from djinn_plugins.transport.resumption import ClientEnd

__all__ = ("EarlyReplies",)


class EarlyReplies:
    """Answers that the server sends before it receives their batches; see `djinn_plugins.executor.early_answers`.

    Attributes:
        used: How many were used.

    Concurrency:
        One thread at a time.
    """

    def __init__(self) -> None:
        self._inbox: EarlyInbox | None = None
        self._wanted = 0
        """How many values the last batch that needs an answer asks for."""
        self._repeated: deque[int] = deque()
        """Batches whose early answers were used, and that are answered once more."""
        self.used = 0

    def accept(self, session: str, *, wanted: bool) -> None:
        """Accept them for a session, if they are wanted."""
        self._inbox = EarlyInbox(session) if wanted else None

    def sent(self, number: int, batch: Batch, frame: memoryview) -> None:
        """Note a batch that is about to be sent, and the first part of its frame."""
        if batch.wants_reply:
            self._wanted = len(batch.fetch) + len(batch.describe)
        if self._inbox is not None:
            self._inbox.sent(number, frame[head_bytes(frame[0]):])

    def arrived(self, number: int, result: Result, tensors: list[torch.Tensor], answered: int) -> None:
        """Keep an early answer; see `djinn_plugins.executor.early_answers.EarlyInbox.arrived`.

        Raises:
            ProtocolError: It was not wanted, or it is none.
        """
        if self._inbox is None:
            raise ProtocolError(f"It answered frame {number} early, which was not wanted.")
        self._inbox.arrived(number, result, tensors, answered)

    def answer(self, number: int, end: ClientEnd[Any]) -> tuple[Result, list[torch.Tensor]] | None:
        """Return the early answer to the last batch that needs an answer, if there is one; its number may be 0."""
        found = None if self._inbox is None or not number else self._inbox.take(number, self._wanted)
        if found is not None:
            end.answered_early(number)
            self.used += 1
            if found[0].others:
                self._repeated.append(number)
        return found

    def is_repeated(self, number: int) -> bool:
        """Whether a batch is answered once more, although its early answer was used: its reports are news."""
        while self._repeated and self._repeated[0] < number:
            self._repeated.popleft()
        return bool(self._repeated) and self._repeated.popleft() == number
